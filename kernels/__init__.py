"""Attention kernels for one process; each fast path has a naive implementation to compare with."""
