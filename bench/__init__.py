"""Benchmarks, one file each; measurements by machine are in `bench/results/`."""
