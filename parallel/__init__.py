"""The dimensions of the mesh."""
