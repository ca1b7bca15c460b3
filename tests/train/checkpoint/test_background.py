"""Saves by a thread beside the training.

What they hold, what they cost, and what is left when something fails.
"""

import os
import signal
import statistics
import time
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist

from runtime.errors import UserError
from runtime.ranks import run_ranks
from runtime.together import from_first, raise_together
from tests.chaos.victim import HOOKS as CALLED
from tests.parallel.tiny import ARCHITECTURE, build, equal, train, whole_tensors
from tests.train.checkpoint.test_full_disk import disk, fill  # noqa: F401
from train.checkpoint.api import CheckpointConfig, load_checkpoint, save_checkpoint, stored_weights
from train.checkpoint.drafts import Background, remove_drafts
from train.checkpoint.manifest import CheckpointError, read_manifest
from train.checkpoint.saving import Saves
from train.checkpoint.search import Keeper, find_checkpoint, saved_iterations
from train.checkpoint.shards import Shards

STEPS = 8


def begin(background, folder, iteration, model, optimizer):
    save_checkpoint(
        folder,
        iteration,
        model,
        optimizer,
        architecture=ARCHITECTURE,
        extra={},
        background=background,
    )


def all_ready(background):
    """Every rank's save is ready: training sums this up within a sum that a step makes anyway."""
    ready = torch.tensor(float(background.ready))
    dist.all_reduce(ready)
    return ready.item() == dist.get_world_size()


def train_on(folder, every, background):
    """Train to the end from the newest checkpoint, as a run does.

    There is a save in every so many steps and at the end.

    Returns the losses by step.
    """
    from_first(lambda: remove_drafts(folder))
    model, optimizer = build(0, sharded=True)
    start, losses = 0, []
    if (path := find_checkpoint(folder, report=lambda note: None)) is not None:
        start = int(path.name[5:])
        load_checkpoint(path, model, optimizer, ARCHITECTURE)
    for step in range(start, STEPS):
        losses += train(model, optimizer, range(step, step + 1))
        if all_ready(background):
            background.step()
        if (step + 1) % every == 0 or step + 1 == STEPS:
            background.wait()
            begin(background, folder, step + 1, model, optimizer)
    background.wait()
    return [0.0] * start + losses


def _trained_while_saving(rank, size, folder):
    background = Background(Keeper(last=2, every=None))
    model, optimizer = build(0, sharded=True)
    saved = {}
    for iteration in (1, 2, 3):  # the first without moments: the memory grows
        begin(background, folder, iteration, model, optimizer)
        saved = {name: value.clone() for name, value in whole_tensors(model, optimizer).items()}
        train(model, optimizer, range(3))  # what is written must be as it was
        assert background.wait() == folder / f"iter_{iteration:07d}"
    after = whole_tensors(model, optimizer)
    model, optimizer = build(1, sharded=True)
    load_checkpoint(find_checkpoint(folder), model, optimizer, ARCHITECTURE)
    loaded = whole_tensors(model, optimizer)
    return equal(loaded, saved), equal(loaded, after), saved_iterations(folder)


def test_what_is_written_is_the_state_at_the_save(tmp_path):
    for exact, trained, left in run_ranks(_trained_while_saving, 2, tmp_path):
        assert exact
        assert not trained, "the comparison can tell states apart"
        assert left == [3, 2]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert not list(tmp_path.glob("*.tmp"))


def _sizes(rank, size, folder):
    background, sizes = Background(Keeper(last=1, every=None)), []
    for iteration, numbers in enumerate(
        (10, 300_000, 70, 70, 5_000), 1
    ):  # no tensor of these is the second rank's
        state = {"weight": torch.arange(float(numbers))}
        begin(background, folder, iteration, state, None)
        path = background.wait()
        written = sum(
            entry[0]
            for name, entry in read_manifest(path).files.items()
            if name.endswith(".distcp")
        )
        tensors, read = stored_weights(path, ARCHITECTURE)
        sizes.append(
            torch.equal(read("weight"), state["weight"]) and 0 < written - 4 * numbers < 4096
        )
        assert tensors.keys() == state.keys()
    return sizes


def test_saves_that_grow_and_shrink_are_whole_and_a_rank_may_have_nothing_to_write(tmp_path):
    assert run_ranks(_sizes, 2, tmp_path) == [[True] * 5] * 2


def _ended_while_saving(rank, size, folder):
    model, optimizer = build(0, sharded=True)
    notes = []
    saves = Saves(config=CheckpointConfig(save=str(folder), async_save=True), say=notes.append)
    saves.save("shared", 1, model, optimizer, architecture=ARCHITECTURE, extra={})

    def bad(together):
        with saves.finished(), raise_together() if together else nullcontext():
            if rank == 1 or not together:  # alike on all ranks, and yet none knows it of the others
                raise UserError("bad sample")

    iterations = []
    for together in (False, True):
        with pytest.raises(UserError, match="bad sample"):
            bad(together)
        iterations.append(saved_iterations(folder))
    return iterations, notes


@pytest.mark.slow
def test_an_error_that_all_ranks_raise_waits_for_the_save_under_way_and_that_of_one_does_not(
    tmp_path,
):
    for iterations, notes in run_ranks(_ended_while_saving, 2, tmp_path):
        assert iterations == [[], [1]]
        assert notes == [
            "the run ends once the save in progress is finished, because of an error: bad sample",
            f"saved {tmp_path}/iter_0000001",
        ]


HOOKS = {hook: CALLED[hook] for hook in ("fsync", "manifest", "rename", "pointer", "prune")}
HOOKS |= {"shard": CALLED["asynchronous shard"], "staging": CALLED["asynchronous staging"]}


def dying(hook, job=None):
    """Do a job, if one is given, and kill this rank at a hook, from now on."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(*HOOKS[hook], die)
    return job and job()


def _killed(rank, size, folder, hook, victim):
    background = Background(Keeper(last=1, every=None))
    plain, copy = background._thread.submit, Shards.copy

    def submit_to_die(job):
        return plain(
            partial(dying, hook, job) if saved_iterations(folder) and rank == victim else job
        )

    def copy_and_die(*args):
        if saved_iterations(folder) and rank == victim:
            dying("staging")
        copy(*args)

    if hook == "staging":
        Shards.copy = copy_and_die
    else:
        background._thread.submit = submit_to_die
    train_on(folder, 3, background)


def _whole(rank, size, folder):
    return train_on(folder, 3, Background(Keeper(last=1, every=None)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "victim"), [(hook, 0) for hook in HOOKS] + [(hook, 1) for hook in ("shard", "staging")]
)
def test_a_kill_leaves_a_whole_checkpoint_and_the_run_goes_on_to_the_bit(tmp_path, hook, victim):
    whole = run_ranks(_whole, 2, tmp_path / "whole")[0]
    with pytest.raises(RuntimeError, match="rank"):
        run_ranks(_killed, 2, tmp_path / "run", hook, victim)
    newest = find_checkpoint(tmp_path / "run", report=lambda note: None)
    assert newest == tmp_path / "run" / f"iter_{6 if hook in ('pointer', 'prune') else 3:07d}"
    start = int(newest.name[5:])
    assert run_ranks(_whole, 2, tmp_path / "run")[0][start:] == whole[start:]
    assert saved_iterations(tmp_path / "run") == saved_iterations(tmp_path / "whole") == [STEPS]
    assert not list((tmp_path / "run").glob("*.tmp"))


def filling(folder, left, job):
    with suppress(OSError):  # the other rank's shard takes room meanwhile
        fill(folder, but=left)
    return job()


def _on_a_full_disk(rank, size, folder, left, failing_at):
    background = Background(Keeper(last=1, every=None))
    model, optimizer = build(0, sharded=True)
    train(model, optimizer, range(1))
    begin(background, folder, 1, model, optimizer)
    background.wait()
    plain, jobs = background._thread.submit, []

    def submit_full(job):
        jobs.append(job)
        now = len(jobs) == (1 if failing_at == "shards" else 2)
        return plain(partial(filling, folder, left, job) if now and rank == 0 else job)

    background._thread.submit = submit_full
    begin(background, folder, 2, model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        background.wait()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing_at", "left", "newest"),
    [("shards", 0, 1), ("shards", 4096, 1), ("manifest", 0, 1), ("pointer", 4096, 2)],
)
def test_a_disk_that_fills_at_any_write_is_an_error_on_all_ranks(
    disk,  # noqa: F811
    failing_at,
    left,
    newest,
):
    first, other = run_ranks(_on_a_full_disk, 2, disk, left, failing_at)
    assert other == first
    assert "iter_0000002." in first
    assert f"bytes are free in {disk}" in first
    assert saved_iterations(disk) == list(range(newest, 0, -1))
    assert not list(disk.glob("*.tmp"))
    assert find_checkpoint(disk, report=lambda note: None) == disk / f"iter_{newest:07d}", (
        "after the rename it is whole"
    )


def _stalls(rank, size, folder, saves):
    """Return the median seconds that training waits for a save of 192 MB at once, and beside it."""
    state = {f"weight {number}": torch.randn(1 << 20) for number in range(48)}
    background, at_once, beside = Background(Keeper(last=1, every=None)), [], []
    for iteration in range(1, saves + 1):
        dist.barrier()
        start = time.perf_counter()
        save_checkpoint(folder / "once", iteration, state, None, architecture={}, extra={})
        at_once.append(time.perf_counter() - start)
        Keeper(last=1, every=None).prune(folder / "once")
        dist.barrier()
        start = time.perf_counter()
        begin(background, folder / "beside", iteration, state, None)
        beside.append(time.perf_counter() - start)
        while background.under_way:
            time.sleep(0.01)
            if all_ready(background):
                start = time.perf_counter()
                background.step()
                beside[-1] += time.perf_counter() - start
    return statistics.median(at_once), statistics.median(beside)


@pytest.mark.slow
def test_training_waits_for_a_fifth_of_the_time_at_most(tmp_path):
    at_once, beside = (
        max(times) for times in zip(*run_ranks(_stalls, 2, tmp_path, 9), strict=True)
    )
    print(
        f"\n192 MB on 2 ranks: {at_once:.3f} s at once, {beside:.3f} s beside training, "
        f"{beside / at_once:.1%}"
    )
    assert beside <= 0.2 * at_once
