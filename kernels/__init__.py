"""Attention of one process, each fast path with a naive twin."""
