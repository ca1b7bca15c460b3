"""Connect the processes of a launch: environment variables, the store, equal versions."""
