"""Ring Attention's table of trajectories at small scale: a world of doors, played as tokens."""
