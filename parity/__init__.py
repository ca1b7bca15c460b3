"""Every mesh equals one process: the proof by training."""
