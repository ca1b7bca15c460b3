"""Save and load checkpoints: atomic, verified, on any mesh."""
