"""Watchers of a training loop, called at its moments."""
