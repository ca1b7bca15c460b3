"""Benchmarks, one file each; what was measured where lies in `bench/results/`."""
