"""Proof, on a small run of the same kind, that a mesh equals one process."""
