"""A run that is killed between two shared checkpoints goes on from the local one.

It is then as the run that nobody disturbed.
"""

import io
import os
import shutil
import signal
from concurrent.futures import wait
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import train.checkpoint.saving
from runtime.ranks import run_ranks
from tests.pretraining import curve, flags_of, on_rank
from train.callbacks.checkpointing import Checkpointing

EXACT = (
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
    "consumed_tokens",
)


def flags(data, save, *more):
    shared = "100" if "--async-save" in more else "4"
    folder = ("--save", str(save), "--load", str(save))
    return flags_of(data, *folder, "--train-iters", "8", "--save-interval", shared, *more)


def _on_node(rank, size, arguments, nodes, killed_after=None):
    """Run as a rank of one of two nodes.

    The last rank is killed after the iteration ``at``. Return what it says.

    With --async-save each iteration waits for what goes on beside it.
    """
    save, beside = Checkpointing.on_step_end, "--async-save" in arguments

    def unless_killed(saving, step):
        if beside:
            assert (
                saving.saves._background._save is None
                or wait([saving.saves._background._save[2]], 300).done
            )
        if rank == size - 1 and step.iteration == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        save(saving, step)

    Checkpointing.on_step_end = unless_killed
    folder, of_run = f"{nodes}{2 * rank // size}", train.checkpoint.saving.local_folder
    train.checkpoint.saving.local_folder = lambda _, save: of_run(
        folder, save
    )  # all nodes have the first one's settings
    every = "1" if size == 2 or beside else "3"
    tier = ["--non-persistent-save-interval", every, "--non-persistent-local-ckpt-dir", folder]
    with redirect_stderr(io.StringIO()) as notes, redirect_stdout(io.StringIO()) as output:
        output.write(on_rank(rank, size, [*arguments, *tier]))
    return notes.getvalue() + output.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "more"),
    [
        (2, ()),
        (4, ()),
        (4, ("--async-save",)),
        (4, ("--data-parallel-sharding-strategy", "ddp")),
        (4, ("--context-parallel-size", "2", "--pipeline-model-parallel-size", "2")),
    ],
)
def test_a_killed_run_goes_on_from_the_local_one_and_without_a_node_from_the_shared_one(
    size, more, default_data, tmp_path
):
    whole, save, nodes = tmp_path / "whole", tmp_path / "run", str(tmp_path / "node")
    run_ranks(_on_node, size, flags(default_data, whole, *more), str(tmp_path / "other"))
    with pytest.raises(RuntimeError, match="rank"):
        run_ranks(_on_node, size, flags(default_data, save, *more), nodes, 8)
    beside = "--async-save" in more
    local = (
        7 if beside or size == 2 else 6
    )  # beside, of iterations 1, 4 and 7: each takes two steps more
    names = {path.name for path in Path(f"{nodes}1").glob("*/iter_*")}
    assert f"iter_000000{local}" in names
    assert len(names) == 1
    for name in (save, *(Path(f"{nodes}{node}") for node in (0, 1))):
        shutil.copytree(name, tmp_path / "kept" / name.name)
    output = run_ranks(_on_node, size, flags(default_data, save, *more), nodes)[0]
    assert f"resumed from {nodes}0/run-" in output
    assert f"/iter_000000{local}, {4 * local} samples consumed" in output
    assert curve(save, *EXACT) == curve(whole, *EXACT)
    assert not list(tmp_path.glob("node*/*/iter_*")), "the run is over, and memory is free"

    for name in ("run", "node0", "node1"):
        shutil.rmtree(tmp_path / name)
        shutil.copytree(tmp_path / "kept" / name, tmp_path / name)
    shutil.rmtree(f"{nodes}1")
    output = run_ranks(_on_node, size, flags(default_data, save, *more), nodes)[0]
    assert f"/iter_000000{local}/manifest.json is missing" in output
    shared = (
        f"no checkpoint in {save}: starting from scratch"
        if beside
        else f"resumed from {save}/iter_0000004, 16 samples"
    )
    assert shared in output
    assert curve(save, *EXACT) == curve(whole, *EXACT)


@pytest.mark.slow
def test_a_smaller_world_goes_on_where_it_sees_all_and_else_says_why(default_data, tmp_path):
    save, nodes = tmp_path / "run", str(tmp_path / "node")
    with pytest.raises(RuntimeError, match="rank"):
        run_ranks(_on_node, 4, flags(default_data, save), nodes, 8)
    shutil.copytree(tmp_path, tmp_path.parent / "kept")
    output = run_ranks(_on_node, 2, flags(default_data, save), nodes)[0]
    assert f"resumed from {nodes}0/run-" in output
    shutil.rmtree(tmp_path)
    shutil.copytree(tmp_path.parent / "kept", tmp_path)
    (output,) = run_ranks(_on_node, 1, flags(default_data, save), nodes)
    assert "/iter_0000006/__2_0.distcp is missing" in output
    assert f"resumed from {save}/iter_0000004" in output
