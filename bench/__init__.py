"""Benchmarks, one file each; `bench/results/` has the measurements of each machine."""
