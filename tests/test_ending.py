"""A run that signals end goes on as if it had never been ended.

A run of which a rank is stopped ends, and says so.

Secrets in the environment are in no file of a run, and in nothing that it says.
"""

import os
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallel.data import Runner
from runtime.ranks import run_ranks
from runtime.watchdog import EXCLUDE, FOLDER
from tests import starts
from tests.pretraining import carried_on, curve, flags_of, on_rank
from tests.runtime.test_signals import runs
from tests.slurm.test_submit import RUN, printed
from tests.starts import PATIENCE, ROOT, children, wait_until
from train.callbacks.metrics import METRICS
from train.callbacks.validation import Validation
from train.checkpoint import saving
from train.checkpoint.search import POINTER, find_checkpoint
from train.trainer import Trainer

EXACT = ("iteration", "lm_loss", "grad_norm", "validation_loss")
FOUR = ("--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1", "--save-interval", "2")


def flags(data, save):
    return flags_of(data, *FOUR, "--save", str(save), "--load", str(save))


@pytest.fixture(scope="module")
def whole(default_data, tmp_path_factory):
    return carried_on(
        2, tmp_path_factory.mktemp("whole") / "run", flags_of(default_data, *FOUR), *EXACT
    )


PLACES = {
    "validation": (Validation, "_loss"),
    "forward_backward": (Runner, "forward_backward"),
    "save_checkpoint": (saving, "save_checkpoint"),
}


def told_on_rank(rank, world_size, arguments, where, number):
    """Train; in iteration 2 the last rank gets a signal at that place."""

    def then(plain):
        def with_signal(*args, **kwargs):
            if rank == world_size - 1 and trainers[0].progress.iteration == 2:
                os.kill(os.getpid(), number)
                time.sleep(0.1)
            return plain(*args, **kwargs)

        return with_signal

    trainers = []
    plain_train = Trainer.train

    def train(trainer, notice=None):
        trainers.append(trainer)
        plain_train(trainer, notice)

    Trainer.train = train
    place, name = PLACES[where]
    setattr(place, name, then(getattr(place, name)))
    return on_rank(rank, world_size, arguments)


@pytest.mark.parametrize(
    ("where", "number", "validated"),
    [
        ("validation", signal.SIGUSR1, False),
        pytest.param("forward_backward", signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param("save_checkpoint", signal.SIGHUP, True, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_save_and_end_and_what_follows_is_the_undisturbed_run(
    where, number, validated, whole, default_data, tmp_path, capsys
):
    save = tmp_path / "run"
    output, _ = run_ranks(told_on_rank, 2, flags(default_data, save), where, int(number))
    assert (
        f"ended early after iteration 2: {number.name} to 1 of 2 processes; resume with --load\n"
        in output
    )
    assert (save / POINTER).read_text() == "2\n"
    assert find_checkpoint(save) == save / "iter_0000002"
    assert [row[0] for row in curve(save, *EXACT)] == [1, 2]
    assert (curve(save, *EXACT)[-1][-1] is not None) == validated
    assert not list(save.glob("*.tmp"))
    capsys.readouterr()
    assert carried_on(2, save, flags_of(default_data, *FOUR), *EXACT) == whole
    assert "validation loss at iteration 2: " in capsys.readouterr().out or validated


def torchrun(*arguments, ranks=2):
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    command = [*starts.torchrun(ranks), *handled, "pretrain_gpt.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(launcher):
    return [
        pid
        for pid in children(launcher)
        if b"pretrain_gpt" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


LONG = ("--train-iters", "100000", "--eval-iters", "0", "--num-workers", "1")


def started(default_data, save):
    """A run under torchrun that has made a step, and its ranks."""
    process = torchrun(*flags(default_data, save), *LONG, "--save-interval", "1000")
    wait_until(
        lambda: (
            process.poll() is not None
            or ((save / METRICS).exists() and (save / METRICS).stat().st_size)
        )
    )
    assert process.poll() is None, process.communicate()[0]
    return process, ranks_of(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("whom", ["rank", "torchrun"])
def test_a_signal_to_a_rank_or_to_torchrun(whom, number, default_data, tmp_path):
    """Torchrun ends with status 1 at a signal of its own, whatever its ranks do."""
    save = tmp_path / "run"
    process, ranks = started(default_data, save)
    os.kill(ranks[1] if whom == "rank" else process.pid, number)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == (0 if whom == "rank" else 1), output
    count = 1 if whom == "rank" else 2
    assert f": {number.name} to {count} of 2 processes; resume with --load\n" in output
    assert (save / POINTER).read_text() == f"{curve(save, 'iteration')[-1][0]}\n"
    assert find_checkpoint(save) is not None
    assert not (save / ".lock").exists()


@pytest.mark.slow
def test_ranks_and_their_loaders_end_with_a_killed_torchrun(default_data, tmp_path):
    process, ranks = started(default_data, tmp_path / "run")
    theirs = [pid for rank in ranks for pid in children(rank)]
    assert len(ranks) == 2
    assert theirs
    process.kill()
    killed = time.monotonic()
    wait_until(lambda: not any(runs(pid) for pid in [*ranks, *theirs]))
    assert time.monotonic() - killed < 5
    process.wait()


CANARY = "canary-of-longmesh"
SECRETS = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "OPENAI_API_KEY",
    "SLURM_JWT",
    "DATABASE_PASSWORD",
)


def leaks(folder):
    """The files with the canary in them, or in their names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        str(path) for path in files if CANARY in str(path) or CANARY.encode() in path.read_bytes()
    ]


@pytest.mark.slow
def test_a_stopped_rank_is_named_all_stacks_are_written_nothing_is_left_and_no_secret_is_told(
    default_data, tmp_path, monkeypatch
):
    """All that writes is on.

    Services, profile, asynchronous saves, both tiers, and the stacks of the stopped rank.
    """
    stopped = 0  # of rank 1 tests/runtime/test_watchdog.py tells
    for number, name in enumerate(SECRETS):
        monkeypatch.setenv(name, f"{number:040d}{CANARY}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    save = tmp_path / "run"
    command = [
        *flags(default_data, save),
        *LONG,
        "--watchdog-factor",
        "20",
        "--watchdog-min-seconds",
        "10",
    ]
    command += ["--async-save", "--profile", "--profile-step-start", "2", "--profile-step-end", "4"]
    command += [
        "--non-persistent-save-interval",
        "3",
        "--non-persistent-local-ckpt-dir",
        str(tmp_path / "local"),
    ]
    if find_spec("wandb") is not None:
        command += [
            "--wandb-project",
            "longmesh",
            "--tensorboard-dir",
            str(tmp_path / "tensorboard"),
        ]
    process = torchrun(*command)
    wait_until(
        lambda: (save / METRICS).exists() and len((save / METRICS).read_text().splitlines()) > 8
    )
    ranks = ranks_of(process.pid)
    theirs = [pid for rank in ranks for pid in children(rank)]
    os.kill(ranks[stopped], signal.SIGSTOP)
    output = process.communicate(timeout=PATIENCE)[0]
    host = socket.gethostname()
    (line,) = (line for line in output.splitlines() if line.startswith("hung: "))
    assert (
        f"s; rank {stopped} on {host} did not answer: stopped, hanging or lost; rank "
        f"{1 - stopped} on "
    ) in line
    assert line == (save / FOLDER / "report.txt").read_text().strip()
    assert (save / EXCLUDE).read_text() == f"{host}\n"
    for rank in (0, 1):
        stacks = (save / FOLDER / f"rank-{rank}.txt").read_text()
        assert "/train/trainer.py" in stacks
        assert "Native, per thread: " in stacks
    wait_until(lambda: not any(runs(pid) for pid in [*ranks, *theirs]))
    assert process.returncode == 1  # torchrun's own; each rank's is in its words
    assert "exitcode  : 75" in output
    assert CANARY not in output
    assert {METRICS, "config.toml", "starts.jsonl"} <= {path.name for path in tmp_path.rglob("*")}
    assert leaks(tmp_path) == []
    (tmp_path / "control").write_text(os.environ["HF_TOKEN"])
    assert leaks(tmp_path) == [str(tmp_path / "control")]


def test_no_secret_of_the_environment_is_in_a_jobs_script(monkeypatch, capsys):
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    assert "#SBATCH" in (script := printed(capsys, "--nodes", "1", *RUN))
    assert CANARY not in script
