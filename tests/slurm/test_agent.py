"""The agent that stands between srun and the ranks.

A signal reaches the ranks, or ends it while there are none.
"""

import os
import subprocess
import sys
import time

import pytest

from runtime.signals import ASKING
from slurm import agent
from tests.runtime.test_signals import forked, status_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ranks are found in /proc")


@pytest.mark.parametrize("number", ASKING)
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_signal_ends_the_ranks_or_an_agent_that_has_none(ranks, number, monkeypatch):
    def body(report):
        def torchrun(arguments):
            started = [subprocess.Popen(["sleep", "20"]) for _ in range(ranks)]
            os.write(report, b".")
            if not ranks:
                time.sleep(5)
            # With a timeout, wait() polls, as torchrun does. Without one it blocks in waitpid, and
            # Python runs no handler of a signal that came just before, until the rank ends itself.
            os._exit(100 + sum(rank.wait(timeout=30) == -number for rank in started))

        monkeypatch.setattr(agent.run, "main", torchrun)
        agent.main([])

    child, _ = forked(body)
    os.kill(child, number)
    assert status_of(child) == (100 + ranks if ranks else 128 + number)


@pytest.mark.parametrize(
    ("gpus", "program", "lacks"),
    [(True, True, ""), (True, False, "numactl"), (False, True, "a GPU")],
)
def test_ranks_are_bound_where_the_node_can_and_a_line_says_where_not(
    gpus, program, lacks, tmp_path, monkeypatch, capsys
):
    if program:
        (tmp_path / "numactl").write_text("#!/bin/sh\n")
        (tmp_path / "numactl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(agent.torch.cuda, "is_available", lambda: gpus)
    argv = ["--nnodes", "1", "--numa-binding=node", "pretrain_gpt.py", "--bf16"]
    assert agent.bound_if_possible(argv) == [
        word for word in argv if not (lacks and "numa" in word)
    ]
    out = capsys.readouterr().out
    assert bool(out) == bool(lacks)
    assert lacks in out
    assert agent.bound_if_possible(argv[:2]) == argv[:2]
    assert not capsys.readouterr().out, "nothing was asked for"


def test_torchrun_knows_the_binding_that_the_job_asks_for():
    arguments = agent.run.parse_args(["--numa-binding=node", "pretrain_gpt.py"])
    assert arguments.numa_binding == "node"
