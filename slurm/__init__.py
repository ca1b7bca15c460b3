"""Jobs of a scheduler."""
