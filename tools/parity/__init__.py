"""A run on its mesh equals one process: the proof on a small one of its kind."""
