"""The proof that a run on its mesh equals one process, on a small run of the same kind."""
