"""The link bench: context-parallel methods between two emulated nodes with a slow link."""
