"""Run a function on real gloo ranks; benches do so too."""

from bench.ranks import run_ranks

__all__ = ["run_ranks"]
