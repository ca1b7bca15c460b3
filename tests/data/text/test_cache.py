"""The cache of sample indices, whole, written once, refused where it is damaged.

Files may change under a run.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from data.text.reader import TokenReader
from runtime.errors import DataError
from runtime.files import owned
from tests.data.text.corpora import counting_documents, write_documents
from tests.data.text.test_megatron import SEQ, build, tokens_of


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "d", counting_documents(40))


def test_cache_is_written_whole_and_reused(tmp_path, prefix):
    build(prefix)
    cache = tmp_path / "d" / "cache"
    (folder,) = cache.iterdir()
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(files) == 9  # 4 files per split, and their digests
    train = build(prefix)[0]
    tokens_of(train, range(3 * len(train)))  # later epochs write nothing
    assert list(cache.iterdir()) == [folder]
    assert files == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_second_run_waits_for_the_first_ones_cache(tmp_path, prefix):
    build(prefix)
    cache = tmp_path / "d" / "cache"
    (folder,) = cache.iterdir()
    folder.rename(tmp_path / "finished")
    reading, writing = os.pipe()
    with owned(cache, folder.name):
        second = os.fork()
        if second == 0:
            sys.stderr = os.fdopen(writing, "w", buffering=1)
            try:
                build(prefix)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writing)
        assert f"in use by process {os.getpid()} on" in os.read(reading, 999).decode()
        (tmp_path / "finished").rename(folder)
        inode = folder.stat().st_ino
    assert os.waitpid(second, 0)[1] == 0
    assert (list(cache.iterdir()), folder.stat().st_ino) == ([folder], inode)


def test_a_killed_runs_half_cache_is_removed(tmp_path, prefix, monkeypatch):
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(
            "data.text.splits.write_digests", lambda folder: os._exit(9)
        )  # as by SIGKILL
        try:
            build(prefix)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    cache = tmp_path / "d" / "cache"
    assert len(list(cache.iterdir())) == 2, "a lock and a half cache"
    build(prefix)
    (folder,) = cache.iterdir()
    assert not folder.name.startswith(".")


def test_data_folder_that_cannot_be_written(tmp_path, prefix):
    Path(prefix).write_text("a file where the cache's folder would be")
    with pytest.raises(DataError, match=r"cannot be written to .*--data-cache-path"):
        build(prefix)
    train = build(prefix, data_cache_path=str(tmp_path / "elsewhere"))[0]
    assert len(train[0]["tokens"]) == SEQ


@pytest.fixture
def train(prefix):
    return build(prefix)[0]


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_file_cut_under_a_run_is_named(prefix, train, end):
    """A memory map of it would end the process by SIGBUS.

    A read of the rest would hand out what was in memory.
    """
    train[0]
    path = Path(prefix + end)
    whole = path.stat().st_size
    os.truncate(path, whole // 2)
    for number in range(len(train)):
        with pytest.raises(
            DataError,
            match=rf"d\{end} has {whole // 2} bytes, but had {whole}: it was changed while",
        ):
            train[number]
    os.truncate(path, whole)  # of zeros, which are token ids
    train[0]


def test_a_read_that_falls_short_is_named(prefix):
    reader = TokenReader(prefix)
    assert reader.read(np.uint16, 3, 0).tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"d\.bin has \d+ bytes, but had"):
        reader.read(np.uint16, 100, os.path.getsize(f"{prefix}.bin") - 10)


def test_a_shuffle_index_out_of_range_is_named(train):
    """As a rank finds it that has not looked at the digests, or that was changed since."""
    train._epochs[0].shuffle_index = np.array(train._epochs[0].shuffle_index) + 10**6
    with pytest.raises(
        DataError,
        match=r"d\.bin: sample 3 cannot be read .* the cached sample indices are damaged",
    ):
        train[3]
