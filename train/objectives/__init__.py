"""Losses of a step."""
