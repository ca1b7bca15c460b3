"""Save and load: atomic, verified, on any mesh."""
