"""A writing of latents that fails leaves nothing, and says what it could not write."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from data.latents.folder import LatentFolder, write_latents
from runtime.errors import DataError
from tests.data.latents.test_dataset import folder, samples


def test_writing_refuses_what_could_not_be_trained_on(tmp_path):
    latents, labels = samples(5)
    latents[3, 0, 0, 0] = 1e6
    with pytest.raises(DataError, match="sample 3 holds a NaN or an infinity in float16"):
        write_latents(tmp_path / "a", [(latents, labels)], dtype="float16")
    assert not (tmp_path / "a").exists()
    with pytest.raises(DataError, match="no samples"):
        write_latents(tmp_path / "b", [])
    folder(tmp_path / "c")
    with pytest.raises(DataError, match="holds latents already"):
        folder(tmp_path / "c")
    assert len(LatentFolder(tmp_path / "c")) == 10


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("ending", [KeyboardInterrupt, DataError])
def test_a_writing_that_ends_early_leaves_what_was_there(tmp_path, kind, ending):
    def batches():
        yield samples(6)
        raise ending

    with pytest.raises(ending):
        write_latents(tmp_path / "a" / "b", batches(), samples_per_shard=4, kind=kind)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ending):
        write_latents(tmp_path, batches(), samples_per_shard=4, kind=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("owner", "call", "file"),
    [(np, "save", "labels-00001"), (os, "fsync", "latents-00001"), (Path, "replace", "latents-00001")],
)
def test_a_disk_that_fills_up_is_named_and_nothing_stays(tmp_path, monkeypatch, owner, call, file):
    done = getattr(owner, call)

    def full(of, *arguments):
        if file in (os.readlink(f"/proc/self/fd/{of}") if isinstance(of, int) else of.name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done(of, *arguments)

    monkeypatch.setattr(owner, call, full)
    message = r"cannot write to .*/a \(No space left on device: [\d,]+ bytes are free in .*\); free space or name"
    with pytest.raises(DataError, match=message):
        folder(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_files_have_the_modes_that_the_umask_asks_for(tmp_path, kind):
    umask = os.umask(0o027)
    try:
        write_latents(tmp_path / "out", [(np.zeros((2, 1, 4, 4), np.float32), np.arange(2))], kind=kind)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


def test_one_writing_of_a_folder_at_a_time_and_a_killed_one_leaves_no_draft(tmp_path):
    def another():
        with pytest.raises(DataError, match=r"is in use by .*or name another folder"):
            write_latents(tmp_path / "a", [samples(6)])
        yield samples(6)

    assert write_latents(tmp_path / "a", another()) == 6
    child = os.fork()
    if child == 0:
        np.save = lambda path, array: os._exit(not path.write_bytes(b"half"))  # as by SIGKILL: no handler runs
        try:
            write_latents(tmp_path / "b", [samples(6)])
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert len(list((tmp_path / "b").glob(".*"))) == 2, "a lock and a draft"
    assert folder(tmp_path / "b").name == "b"
    assert list((tmp_path / "b").glob(".*")) == []
