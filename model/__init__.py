"""Models for a single device; no module depends on ranks, process groups or the environment."""
