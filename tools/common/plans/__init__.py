"""Ranked plans: printed, and as a page with pictures."""
