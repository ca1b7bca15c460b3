"""Ring Attention's table of trajectories in small: episodes as tokens, a world of doors, models
that learn in it.
"""
