"""torchrun's own restarts: --max-restarts after a killed rank, and --nnodes MIN:MAX with nodes that go and come."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from runtime.ranks import run_ranks
from tests.pretraining import flags_of, on_rank
from tests.starts import ROOT, children, free_port, wait_until
from tests.test_resize import BOUND, SIZES, apart
from train.watching.metrics import METRICS, read_metrics


def flags(data, save):
    """40 iterations, each of which is saved."""
    more = ("--save", str(save), "--load", str(save), "--train-iters", "40", "--save-interval", "1", "--keep-last", "2")
    return flags_of(data, *SIZES, "--allow-resize", *more)


@pytest.fixture(scope="module")
def whole(default_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(on_rank, 2, flags(default_data, save))
    return read_metrics(save / METRICS)


@contextmanager
def torchrun(log, *arguments):
    """An agent and its ranks, a process group of their own, of which nothing stays."""
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        agent = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield agent
    finally:
        end(agent)


def end(agent):
    """Kill an agent and its ranks."""
    ranks = children(agent.pid)
    for pid in (agent.pid, *ranks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def listens(port):
    """True if a program on this machine takes connections on a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def made(save):
    """The iterations in metrics.jsonl."""
    return len(read_metrics(save / METRICS)) if (save / METRICS).exists() else 0


@pytest.mark.slow
def test_max_restarts_goes_on_after_a_killed_rank(default_data, whole, tmp_path):
    save, log = tmp_path / "run", tmp_path / "log"
    launch = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "pretrain_gpt.py")
    with torchrun(log, *launch, *flags(default_data, save)) as agent:
        for before in (3, 10):
            wait_until(lambda before=before: made(save) > before)
            os.kill(children(agent.pid)[-1], signal.SIGKILL)
        assert agent.wait() == 0, log.read_text()
    assert log.read_text().count("resumed from ") == 2
    assert apart(read_metrics(save / METRICS), whole) == 0


@pytest.mark.slow
def test_agents_that_go_and_come_resize_the_run(default_data, whole, tmp_path, monkeypatch):
    # Without it an agent that stays does not tell one that comes where the store is (torch 2.13).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    save, logs, port = tmp_path / "run", [tmp_path / "0.log", tmp_path / "1.log"], free_port()
    launch = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d")
    launch += (*f"--rdzv-endpoint 127.0.0.1:{port} --rdzv-conf last_call_timeout=3 --local-addr 127.0.0.1".split(),)
    command = (*launch, "pretrain_gpt.py", *flags(default_data, save))
    with torchrun(logs[0], *command) as first:
        wait_until(lambda: listens(port))  # it has the agents' store, and stays
        with torchrun(logs[1], *command) as second:
            wait_until(lambda: made(save) > 3 or first.poll() is not None)
            end(second)
        reached = made(save)
        wait_until(lambda: made(save) > reached + 4 or first.poll() is not None)
        with torchrun(logs[1], *command) as second:
            assert first.wait() == 0, logs[0].read_text()
            assert second.wait() == 0, logs[1].read_text()
    said = logs[0].read_text() + logs[1].read_text()
    assert "resized from 2 to 1 process" in said
    assert said.count("resumed from ") == 2
    assert apart(read_metrics(save / METRICS), whole) <= BOUND
