"""--allow-resize: a run goes on with other processes, which the planner arranges.

Batch, samples and losses stay.

So does torchrun's own restart: --max-restarts after a killed rank, and --nnodes MIN:MAX with nodes
that go and come.
"""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from runtime.ranks import run_ranks
from tests.pretraining import flags_of, on_rank, pretrain, pretrain_digits
from tests.starts import ROOT, children, free_port, wait_until
from train.callbacks.metrics import METRICS, read_metrics
from train.checkpoint.search import POINTER
from train.config.language import load_config
from train.trainer import Trainer

COUNTED = ("iteration", "consumed_samples", "consumed_tokens", "learning_rate")
BOUND = 2e-6
SIZES = ("--context-parallel-size", "2", "--micro-batch-size", "2", "--global-batch-size", "none")


def apart(got, want):
    """The largest difference of losses over the same iterations, which have the same samples."""
    assert [[record[name] for name in COUNTED] for record in got] == [
        [record[name] for name in COUNTED] for record in want
    ]
    return max(abs(a["lm_loss"] - b["lm_loss"]) for a, b in zip(got, want, strict=True))


def test_one_of_two_processes_goes_on_and_then_both(default_data, tmp_path, capsys):
    """No global_batch_size is given: the 2 of the one data-parallel rank stay."""
    flags, save = (
        (*SIZES, "--train-iters", "3", "--num-layers", "1", "--allow-resize"),
        tmp_path / "run",
    )
    began = tmp_path / "whole"
    whole = pretrain(2, default_data, began, *flags, "--save-interval", "1")
    capsys.readouterr()
    pretrain(
        1,
        default_data,
        save,
        *flags,
        "--load",
        str(began),
        "--ckpt-step",
        "1",
        "--exit-interval",
        "2",
    )
    line = (
        "resized from 2 to 1 process: pipeline 1 x data 1 x context 1 x tensor 1, 1 "
        "micro-batch "
        "of 2 for "
    )
    assert f"{line}global_batch_size 2; predicted to take " in (output := capsys.readouterr().out)
    assert "note: " not in output
    saved_config = load_config(save / "config.toml")
    assert (
        saved_config.mesh.context_parallel_size,
        saved_config.mesh.full_world_size,
        saved_config.train.global_batch_size,
    ) == (2, 2, None)
    got = pretrain(2, default_data, save, *flags, "--load", str(save))
    assert "resized" not in capsys.readouterr().out
    assert apart(got, whole[1:]) <= BOUND


@pytest.mark.slow
def test_a_diffusion_transformer_goes_on_with_fewer(tmp_path):
    flags = ("--train-iters", "4", "--tensor-model-parallel-size", "2")
    whole = pretrain_digits(4, tmp_path / "whole", *flags)
    pretrain_digits(4, tmp_path / "run", *flags, "--exit-interval", "2")
    resizing = (*flags, "--load", str(tmp_path / "run"), "--allow-resize")
    got = pretrain_digits(3, tmp_path / "run", *resizing)
    assert [record["consumed_samples"] for record in got] == [
        record["consumed_samples"] for record in whole
    ]
    assert (
        max(abs(a["diffusion_loss"] - b["diffusion_loss"]) for a, b in zip(got, whole, strict=True))
        <= BOUND
    )


def killed_on_rank(rank, world_size, arguments, before):
    """Train; the last rank is killed before an iteration."""
    plain = Trainer.train_step

    def iteration(trainer, *args):
        if rank == world_size - 1 and trainer.progress.iteration == before - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(trainer, *args)

    Trainer.train_step = iteration
    on_rank(rank, world_size, arguments)


@pytest.mark.slow
def test_four_processes_killed_go_on_as_two_killed_go_on_as_four(default_data, tmp_path, capsys):
    flags, save = (
        (*SIZES, "--train-iters", "10", "--save-interval", "2", "--allow-resize"),
        tmp_path / "run",
    )
    whole = pretrain(4, default_data, tmp_path / "whole", *flags)
    flags += ("--load", str(save))
    for processes, before in ((4, 4), (2, 8)):  # iteration 3 is lost, and iteration 7
        with pytest.raises(
            RuntimeError, match=r"died without a message|reset by peer|closed by peer"
        ):
            run_ranks(
                killed_on_rank,
                processes,
                flags_of(default_data, *flags, "--save", str(save)),
                before,
            )
        assert (save / POINTER).read_text() == f"{before - 2}\n"
    capsys.readouterr()
    got = pretrain(4, default_data, save, *flags)
    assert f"resumed from {save / 'iter_0000006'}, 24 samples consumed" in capsys.readouterr().out
    assert apart(got, whole) <= BOUND


RESTARTING = (
    *SIZES,
    "--allow-resize",
    "--train-iters",
    "40",
    "--save-interval",
    "1",
    "--keep-last",
    "2",
)
"""40 iterations, each of which is saved."""


@pytest.fixture(scope="module")
def whole(default_data, tmp_path_factory):
    return pretrain(2, default_data, tmp_path_factory.mktemp("whole") / "run", *RESTARTING)


@contextmanager
def torchrun(log, launch, data, save):
    """An agent and its ranks, a process group of their own, of which nothing stays."""
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "pretrain_gpt.py"]
    command += flags_of(data, *RESTARTING, "--save", str(save), "--load", str(save))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        agent = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield agent
    finally:
        end(agent)


def end(agent):
    """Kill an agent and its ranks."""
    for pid in (agent.pid, *children(agent.pid)):
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
    launch = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    with torchrun(log, launch, default_data, save) as agent:
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
    launch = f"""
        --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d
        --local-addr 127.0.0.1 --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf last_call_timeout=3
    """.split()
    with torchrun(logs[0], launch, default_data, save) as first:
        wait_until(lambda: listens(port))  # it has the agents' store, and stays
        with torchrun(logs[1], launch, default_data, save) as second:
            wait_until(lambda: made(save) > 3 or first.poll() is not None)
            end(second)
        reached = made(save)
        wait_until(lambda: made(save) > reached + 4 or first.poll() is not None)
        with torchrun(logs[1], launch, default_data, save) as second:
            assert first.wait() == 0, logs[0].read_text()
            assert second.wait() == 0, logs[1].read_text()
    output = logs[0].read_text() + logs[1].read_text()
    assert "resized from 2 to 1 process" in output
    assert output.count("resumed from ") == 2
    assert apart(read_metrics(save / METRICS), whole) <= BOUND
