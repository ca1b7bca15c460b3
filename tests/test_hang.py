"""A run under torchrun of which a rank is stopped: it is named, all stacks are written, and nothing stays behind."""

import os
import signal
import socket
from pathlib import Path

import pytest

from runtime.watchdog import EXCLUDE, FOLDER
from tests.runtime.test_signals import runs
from tests.starts import PATIENCE, wait_until
from tests.test_ending import LONG, flags, ranks_of, torchrun
from train.watching.metrics import METRICS


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_nothing_is_left(stopped, default_data, tmp_path):
    save = tmp_path / "run"
    limits = ["--watchdog-factor", "20", "--watchdog-min-seconds", "10"]
    process = torchrun(*flags(default_data, save), *LONG, *limits)
    wait_until(lambda: (save / METRICS).exists() and len((save / METRICS).read_text().splitlines()) > 4)
    ranks = ranks_of(process.pid)
    theirs = [int(pid) for rank in ranks for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]
    os.kill(ranks[stopped], signal.SIGSTOP)
    said = process.communicate(timeout=PATIENCE)[0]
    host = socket.gethostname()
    (line,) = (line for line in said.splitlines() if line.startswith("hung: "))
    assert (
        f"s; rank {stopped} on {host} did not answer: stopped, hanging or lost; rank {1 - stopped} on {host} " in line
    )
    assert line == (save / FOLDER / "report.txt").read_text().strip()
    assert (save / EXCLUDE).read_text() == f"{host}\n"
    for rank in (0, 1):
        stacks = (save / FOLDER / f"rank-{rank}.txt").read_text()
        assert "/train/loop.py" in stacks
        assert "Native, per thread: " in stacks
    wait_until(lambda: not any(runs(pid) for pid in [*ranks, *theirs]))
    assert process.returncode == 1  # torchrun's own; each rank's is in its words
    assert "exitcode  : 75" in said
