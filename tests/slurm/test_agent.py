"""The agent that stands between srun and the ranks: a signal reaches the ranks, or ends it while there are none."""

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
            started = [subprocess.Popen(["sleep", "5"]) for _ in range(ranks)]
            os.write(report, b".")
            if not ranks:
                time.sleep(5)
            os._exit(100 + sum(rank.wait() == -number for rank in started))

        monkeypatch.setattr(agent.run, "main", torchrun)
        agent.main([])

    child, _ = forked(body)
    os.kill(child, number)
    assert status_of(child) == (100 + ranks if ranks else 128 + number)
