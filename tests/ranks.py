"""Run a function on real gloo ranks; benches do so too."""

from bench import ranks
from bench.ranks import run_ranks

__all__ = ["run_ranks"]

ranks._context.set_forkserver_preload(["bench.preload", "tests.preload"])
