"""Ranks that make no step are named, with the stacks of all."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.ranks import run_ranks
from runtime.slurm import AGAIN
from runtime.watchdog import EXCLUDE, FOLDER, LEAST_STEPS, Watchdog

HOST = socket.gethostname()


def stuck(rank, world_size, folder, how):
    """Make some steps; then rank 1 is stopped, or waits elsewhere, and the others wait for it."""
    pair = dist.new_group([0, 1], group_desc="pair")
    with Watchdog(2.0, 1.0, folder) as watchdog:
        for _ in range(LEAST_STEPS):
            dist.all_reduce(torch.ones(1))
            watchdog.beat(0.01)
        if rank == 1 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1 and how == "elsewhere":
            dist.broadcast(torch.ones(2), 0, group=pair)
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "words", "nodes"),
    [
        ("stopped", f"; rank 1 on {HOST} did not answer: stopped, hanging or lost; ", f"{HOST}\n"),
        pytest.param(
            "elsewhere",
            (
                f"; rank 1 on {HOST} waits in broadcast 1 of pair (at "
                f"tests/runtime/test_watchdog.py:31); "
            ),
            "",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_hangs_is_named_and_all_stacks_are_written(how, words, nodes, tmp_path):
    with pytest.raises(RuntimeError, match=f"died without a message, exit code ({AGAIN}|-9)"):
        run_ranks(stuck, 3, str(tmp_path), how)
    report = (tmp_path / FOLDER / "report.txt").read_text()
    assert report.startswith("hung: no step in ")
    assert words in report
    waiting = (
        f"rank 0 on {HOST}, rank 2 on {HOST} waits in all_reduce 6 of default_pg (at "
        f"tests/runtime/test_watchdog"
    )
    assert waiting in report
    assert (tmp_path / EXCLUDE).read_text() == nodes
    for rank in range(3):
        stacks = (tmp_path / FOLDER / f"rank-{rank}.txt").read_text()
        assert (
            'test_watchdog.py", line'
            in stacks.partition("Native")[0 if rank != 1 or how != "stopped" else 2]
        )
        assert "Native, per thread: " in stacks
    assert "did not answer" in (tmp_path / FOLDER / "rank-1.txt").read_text() or how != "stopped"


def at_work(rank, world_size, folder):
    """A save that takes longer than a step may."""
    with Watchdog(3.0, 0.4, folder) as watchdog:
        for _ in range(LEAST_STEPS):
            watchdog.beat(0.2)
        with watchdog.paused():
            time.sleep(1.5)
    return not any(Path(folder).iterdir())


def test_a_pause_is_no_hang(tmp_path):
    assert run_ranks(at_work, 1, str(tmp_path)) == [True]
