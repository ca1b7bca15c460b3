"""Check, on a small run of the same kind, that a mesh computes the same as one process."""
