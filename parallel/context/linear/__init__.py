"""Linear attention and delta rules over ranks, which exchange states instead of keys and values."""
