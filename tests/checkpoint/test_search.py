import os
import shutil
import signal
from pathlib import Path

import pytest

from checkpoint.manifest import checkpoint_folder
from checkpoint.search import Keeper, find_checkpoint, saved_iterations
from runtime.ranks import run_ranks
from tests.parallel.tiny import build, flip_a_byte, save, train


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of iterations 1 to 6."""
    folder = tmp_path_factory.mktemp("made")
    model, optimizer = build(0, sharded=False)
    for iteration in range(1, 7):
        train(model, optimizer, range(1))
        save(folder, iteration, model, optimizer)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.mark.parametrize(
    ("last", "every", "left"),
    [
        (None, None, [6, 5, 4, 3, 2, 1]),
        (2, None, [6, 5]),
        (2, 3, [6, 5, 3]),
        (None, 4, [6, 4]),
        (9, None, range(6, 0, -1)),
    ],
)
def test_the_newest_and_every_so_many_stay(run, last, every, left):
    Keeper(last=last, every=every).prune(run)
    assert saved_iterations(run) == list(left)
    assert not list(run.glob("*.tmp"))
    assert find_checkpoint(run) == checkpoint_folder(run, 6)


def test_broken_ones_do_not_count(run):
    flip_a_byte(checkpoint_folder(run, 6))
    (checkpoint_folder(run, 5) / "__0_0.distcp").write_bytes(b"cut")
    flip_a_byte(checkpoint_folder(run, 2))
    notes = []
    keeper = Keeper(last=2, every=None, report=notes.append, verified={checkpoint_folder(run, 5)})
    keeper.prune(run)
    assert saved_iterations(run) == [6, 5, 4, 3]
    assert len(notes) == 2
    assert "iter_0000006/__0_0.distcp has another SHA-256" in notes[0]
    assert "iter_0000005/__0_0.distcp has 3 bytes" in notes[1], "sizes are looked at even if its bytes were hashed"
    assert find_checkpoint(run, report=notes.append) == checkpoint_folder(run, 4)


def test_bytes_are_read_once(run, monkeypatch):
    keeper = Keeper(last=2, every=None)
    keeper.prune(run)
    monkeypatch.setattr("checkpoint.search.describe", lambda path: pytest.fail(f"{path} is read again"))
    keeper.prune(run)


def test_a_folder_that_cannot_be_removed_is_reported(run, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    notes = []
    Keeper(last=5, every=None, report=notes.append).prune(run)
    assert notes == [f"cannot remove {run / 'iter_0000001'}, which is older than those to keep: Permission denied"]
    assert saved_iterations(run) == [6, 5, 4, 3, 2, 1]


def _killed(rank, size, run):
    if rank == 0:
        shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    Keeper(last=2, every=None).prune(run)


def test_a_kill_leaves_a_draft_that_the_next_save_removes(run):
    with pytest.raises(RuntimeError, match="rank"):  # it died, or its peer says that it did
        run_ranks(_killed, 2, run)
    assert saved_iterations(run) == [6, 5, 3, 2, 1]
    assert find_checkpoint(run, report=lambda note: None) == checkpoint_folder(run, 6)
    save(run, 7, *build(0, sharded=False))
    assert not list(run.glob("*.tmp"))
    Keeper(last=2, every=None).prune(run)
    assert saved_iterations(run) == [7, 6]
