"""A run that signals end goes on as if it had never been ended; one of which a rank is stopped ends, and says so."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from checkpoint import saving
from checkpoint.search import POINTER, find_checkpoint
from parallel.data import Runner
from runtime.ranks import run_ranks
from runtime.watchdog import EXCLUDE, FOLDER
from tests import starts
from tests.pretraining import flags_of, on_rank
from tests.runtime.test_signals import runs
from tests.starts import PATIENCE, ROOT, children, wait_until
from train.loop import Trainer
from train.watching.metrics import METRICS, read_metrics
from train.watching.validation import Validation

EXACT = ("iteration", "lm_loss", "grad_norm", "validation_loss")
SIX = ("--train-iters", "6", "--eval-interval", "2", "--eval-iters", "2", "--save-interval", "2")


def flags(data, save):
    return flags_of(data, *SIX, "--save", str(save), "--load", str(save))


def curve(save):
    return [[record.get(name) for name in EXACT] for record in read_metrics(save / METRICS)]


@pytest.fixture(scope="module")
def whole(default_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(on_rank, 2, flags(default_data, save))
    return curve(save)


def told_on_rank(rank, world_size, arguments, where, number):
    """Train; in iteration 4 the last rank gets a signal at that place."""

    def then(plain):
        def with_signal(*args, **kwargs):
            if rank == world_size - 1 and at() == 4:
                os.kill(os.getpid(), number)
                time.sleep(0.1)
            return plain(*args, **kwargs)

        return with_signal

    trainers = []
    plain_train = Trainer.train

    def train(trainer, notice=None):
        trainers.append(trainer)
        plain_train(trainer, notice)

    def at():
        return trainers[0].progress.iteration

    Trainer.train = train
    if where == "save_checkpoint":
        saving.save_checkpoint = then(saving.save_checkpoint)
    elif where == "validation":
        Validation._loss = then(Validation._loss)
    else:
        Runner.forward_backward = then(Runner.forward_backward)
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
    where, number, validated, whole, default_data, tmp_path
):
    save = tmp_path / "run"
    said, _ = run_ranks(told_on_rank, 2, flags(default_data, save), where, int(number))
    assert f"ended early after iteration 4: {number.name} to 1 of 2 processes; --load goes on\n" in said
    assert (save / POINTER).read_text() == "4\n"
    assert find_checkpoint(save) == save / "iter_0000004"
    assert [row[0] for row in curve(save)] == [1, 2, 3, 4]
    assert (curve(save)[-1][-1] is not None) == validated
    assert not list(save.glob("*.tmp"))
    again, _ = run_ranks(on_rank, 2, flags(default_data, save))
    assert "validation loss at iteration 4: " in again or validated
    assert curve(save) == whole


@pytest.mark.slow
def test_a_run_whose_time_is_over_goes_on(whole, default_data, tmp_path):
    save = tmp_path / "run"
    for last in (1, 2):  # a start makes a step at least
        (said,) = run_ranks(on_rank, 1, [*flags(default_data, save), "--exit-duration-in-mins", "0.00001"])
        assert f"ended early after iteration {last}: exit_duration_in_mins 1e-05 are over; --load goes on" in said


def torchrun(*arguments, ranks=2):
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    command = [*starts.torchrun(ranks), *handled, "pretrain_gpt.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)


def ranks_of(launcher):
    return [pid for pid in children(launcher) if b"pretrain_gpt" in Path(f"/proc/{pid}/cmdline").read_bytes()]


LONG = ("--train-iters", "100000", "--eval-iters", "0", "--num-workers", "1")


def started(default_data, save):
    """A run under torchrun that has made a step, and its ranks."""
    process = torchrun(*flags(default_data, save), *LONG, "--save-interval", "1000")
    wait_until(lambda: process.poll() is not None or ((save / METRICS).exists() and (save / METRICS).stat().st_size))
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
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == (0 if whom == "rank" else 1), said
    of = 1 if whom == "rank" else 2
    assert f": {number.name} to {of} of 2 processes; --load goes on\n" in said
    records = read_metrics(save / METRICS)
    assert (save / POINTER).read_text() == f"{records[-1]['iteration']}\n"
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


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_all_stacks_are_written_and_nothing_is_left(stopped, default_data, tmp_path):
    save = tmp_path / "run"
    limits = ["--watchdog-factor", "20", "--watchdog-min-seconds", "10"]
    process = torchrun(*flags(default_data, save), *LONG, *limits)
    wait_until(lambda: (save / METRICS).exists() and len((save / METRICS).read_text().splitlines()) > 4)
    ranks = ranks_of(process.pid)
    theirs = [pid for rank in ranks for pid in children(rank)]
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
