"""A layer that takes its sequence slice by slice: the slices, their attention and their states."""
