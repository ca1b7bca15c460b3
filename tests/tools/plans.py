"""A model and a cluster to plan for, and the rows of the answer."""

import re

import pytest

from planner.cluster import CLUSTERS
from runtime import progress

A100 = ("--cluster", str(CLUSTERS / "wallfacer_a100_8.toml"))
MODEL = (
    "--vocab-size",
    "512",
    "--num-attention-heads",
    "8",
    "--hidden-size",
    "512",
    "--seq-length",
    "4096",
)
NO_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    for name in NO_LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(progress, "FIRST_LOG_SECONDS", progress.LOG_SECONDS)


def rows_of(out):
    """Return the cells of a terminal's table, between which there are two spaces or more."""
    return [
        re.split(r"  +", line.strip()) for line in out.splitlines() if re.match(r" *\d+  ", line)
    ]
