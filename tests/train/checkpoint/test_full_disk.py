"""A full disk, a real one: a file system in memory that holds a few pages."""

import os
import subprocess

import pytest

from data.text.prepare import Request, prepare
from runtime.errors import DataError
from tests.parallel.tiny import build, save, train
from tests.starts import ended
from train.callbacks.metrics import METRICS, LoggingConfig, RunLog, read_metrics
from train.checkpoint import api as checkpoint
from train.checkpoint.manifest import CheckpointError
from train.checkpoint.search import find_checkpoint
from train.config.flags import ConfigError

SIZE = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A file system of ``SIZE`` bytes; it needs root, as every mount does."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ended(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder])
    if mounted.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder, *, but=0):
    """Leave ``but`` bytes free."""
    size = os.statvfs(folder)
    (folder / "ballast").write_bytes(bytes(size.f_bavail * size.f_frsize - but))


def names(folder):
    return {path.name for path in folder.iterdir()} - {"ballast"}


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_checkpoint_without_room_is_refused_and_leaves_nothing_half_written(
    disk, when, monkeypatch
):
    model, optimizer = build(0, sharded=False)
    train(model, optimizer, range(1))
    first = save(disk, 1, model, optimizer)
    before, checked, message = (
        names(disk),
        checkpoint.check_room,
        rf"cannot write .* 0 bytes are free in {disk}",
    )

    def check_then_fill(rooms, needed):
        checked(rooms, needed)
        fill(disk)

    if when == "before":
        fill(disk)
        message += r", but [\d,]+ are needed; remove older"
    else:
        monkeypatch.setattr(checkpoint, "check_room", check_then_fill)
    with pytest.raises(CheckpointError, match=message):
        save(disk, 2, model, optimizer)
    assert names(disk) == before
    assert find_checkpoint(disk) == first


def test_a_record_is_written_whole_or_not_at_all(disk):
    log = RunLog(disk, LoggingConfig(), {}, 0)
    fill(disk, but=4096)
    written = []

    def write_on():
        for iteration in range(1, SIZE):
            log.write({"iteration": iteration, "lm_loss": 1.5})
            written.append(iteration)

    with pytest.raises(
        ConfigError, match=rf"save is {disk}, .* 0 bytes are free in {disk}.*free disk space"
    ):
        write_on()
    assert [record["iteration"] for record in read_metrics(disk / METRICS)] == written != []
    assert (disk / METRICS).read_text().endswith("}\n")


def test_a_preparation_without_room_names_the_folder_and_leaves_nothing(disk, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"A line of text, number {number}.\n" for number in range(20_000)))
    fill(disk, but=8192)
    with pytest.raises(DataError, match=rf"cannot write .*[\d,]+ bytes are free in {disk}"):
        prepare(Request(inputs=(str(text),), vocab_size=300), disk / "data", progress=False)
    assert names(disk) == set()
