"""Whole checkpoints are found, broken ones named and passed over, older ones removed."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from runtime import __version__
from runtime.ranks import run_ranks
from tests.parallel.tiny import (
    ARCHITECTURE,
    build,
    flip_a_byte,
    rewrite_manifest,
    save,
    train,
    two_checkpoints,
)
from train.checkpoint import manifest, verify
from train.checkpoint.api import load_checkpoint, save_checkpoint
from train.checkpoint.manifest import CheckpointError, checkpoint_folder, describe, read_manifest
from train.checkpoint.search import Keeper, find_checkpoint, saved_iterations
from train.checkpoint.verify import find_damage


def _alter_extra(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"consumed_samples": 8', '"consumed_samples": 9'))


def _signed(folder, **changes):
    """Change a manifest's own entries, None to remove one, and its checksum with them."""
    content = json.loads((folder / "manifest.json").read_text()) | changes
    content = {
        name: value for name, value in content.items() if value is not None and name != "checksum"
    }
    content["checksum"] = manifest._checksum(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def _leave_out_the_shard(folder):
    """A manifest that is true of less than the checkpoint."""
    (folder / "__0_0.distcp").unlink()
    rewrite_manifest(folder, files={".metadata": describe(folder / ".metadata")})


BREAKAGES = {
    "flipped byte": (flip_a_byte, "__0_0.distcp has a different SHA-256"),
    "truncated shard": (
        lambda folder: os.truncate(folder / "__0_0.distcp", 99),
        "__0_0.distcp has 99 bytes instead of",
    ),
    "missing shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "empty manifest": (
        lambda folder: os.truncate(folder / "manifest.json", 0),
        "manifest.json cannot be read",
    ),
    "manifest of another kind": (
        lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
        "manifest.json is not a JSON object",
    ),
    "altered manifest": (_alter_extra, "manifest.json does not match its own checksum"),
    "newer format": (
        lambda folder: _signed(folder, format_version=2),
        "has format 2, but this version of Longmesh reads 1",
    ),
    "path outside": (
        lambda folder: rewrite_manifest(folder, files={"../secret": (1, "0" * 64)}),
        "lists '../secret', which is not a file of its folder",
    ),
    "shard left out": (
        _leave_out_the_shard,
        "metadata points at '__0_0.distcp', which is not a file of the checkpoint",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_checkpoint_is_named_and_fallen_back_from(tmp_path, breakage):
    two_checkpoints(tmp_path)
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    damage, message = BREAKAGES[breakage]
    damage(tmp_path / "iter_0000002")
    notes = []
    assert find_checkpoint(tmp_path, report=notes.append) == tmp_path / "iter_0000001"
    assert "iter_0000002" in notes[0]
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path, 2)
    assert find_checkpoint(tmp_path, 1) == tmp_path / "iter_0000001"
    damage(tmp_path / "iter_0000001")
    # Unless an earlier one is whole, starting afresh would throw the run away.
    if breakage != "altered manifest":
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            find_checkpoint(tmp_path)


def _find(rank, size, folder):
    notes = []
    checkpoint = find_checkpoint(folder, report=notes.append)
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(folder, 2)
    hashed = []
    verify.describe = lambda path: hashed.append(path.name) or describe(path)
    find_damage(checkpoint)
    return str(checkpoint), notes, str(caught.value), hashed


def test_ranks_find_the_same_checkpoint_and_share_the_hashing(tmp_path):
    run_ranks(_save_twice, 3, tmp_path)
    flip_a_byte(tmp_path / "iter_0000002")
    answers = run_ranks(_find, 2, tmp_path)
    assert {answer[0] for answer in answers} == {str(tmp_path / "iter_0000001")}
    assert "iter_0000002" in answers[0][1][0]
    assert answers[1][1] == [], "one rank reports"
    assert answers[0][2] == answers[1][2]
    assert "__0_0.distcp has a different SHA-256" in answers[0][2]
    shared = [name for answer in answers for name in answer[3]]
    assert sorted(shared) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert all(len(answer[3]) == 2 for answer in answers)


def _save_twice(rank, size, folder):
    model, optimizer = build(0, sharded=True)
    train(model, optimizer, range(1))
    for iteration in (1, 2):
        save(folder, iteration, model, optimizer)


def test_where_there_is_none(tmp_path):
    assert find_checkpoint(tmp_path / "not there") is None
    (tmp_path / "iter_0000007.tmp").mkdir()
    (tmp_path / "iter_7").mkdir()
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"ckpt_step is 7, .* no checkpoint at all"):
        find_checkpoint(tmp_path, 7)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not a folder"):
        find_checkpoint(tmp_path / "file")


def test_the_manifest_gives_back_what_was_put_in(tmp_path):
    model, optimizer = build(0, sharded=False)
    extra = {
        "loss": 0.1 + 0.2,
        "nan": float("inf"),
        "nested": {10: 1, 9: [2, None]},
        "name": "Größe",
    }
    path = save_checkpoint(
        tmp_path, 12345678, model, optimizer, architecture=ARCHITECTURE, extra=extra
    )
    assert path.name == "iter_12345678"
    assert find_checkpoint(tmp_path) == path
    read_back = read_manifest(path)
    assert read_back.extra == {**extra, "nested": {"10": 1, "9": [2, None]}}
    assert (read_back.iteration, read_back.torch_version, read_back.longmesh_version) == (
        12345678,
        torch.__version__,
        __version__,
    )
    # A checkpoint of a version that did not say which one it is.
    _signed(path, longmesh_version=None)
    assert read_manifest(path).longmesh_version == "unknown"
    # Saved before the first step: the optimizer starts without state, not with steps at 1.
    train(model, optimizer, range(1))
    load_checkpoint(path, model, optimizer, ARCHITECTURE)
    assert not optimizer.state


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """Checkpoints of iterations 1 to 6."""
    folder = tmp_path_factory.mktemp("made")
    model, optimizer = build(0, sharded=False)
    for iteration in range(1, 7):
        train(model, optimizer, range(1))
        save(folder, iteration, model, optimizer)
    return folder


@pytest.fixture
def run(saved_run, tmp_path):
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


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
    assert "iter_0000006/__0_0.distcp has a different SHA-256" in notes[0]
    assert "iter_0000005/__0_0.distcp has 3 bytes" in notes[1], (
        "sizes are looked at even if its bytes were hashed"
    )
    assert find_checkpoint(run, report=notes.append) == checkpoint_folder(run, 4)


def test_bytes_are_read_once(run, monkeypatch):
    keeper = Keeper(last=2, every=None)
    keeper.prune(run)
    monkeypatch.setattr(
        "train.checkpoint.verify.describe", lambda path: pytest.fail(f"{path} is read again")
    )
    keeper.prune(run)


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
