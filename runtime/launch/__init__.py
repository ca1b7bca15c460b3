"""Let the processes of a launch find each other: environment variables, store, versions."""
