"""Files are known again by what they hold, at a cost that their size does not change."""

import os

import numpy as np
import pytest

from data.fingerprint import SAMPLE_BYTES, SAMPLES, fingerprint
from data.latents.folder import latents_fingerprint


def written(folder, *contents):
    folder.mkdir()
    index = folder / "x.idx"
    index.write_bytes(b"index")
    files = [folder / f"{number}.bin" for number in range(len(contents))]
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content)
    return index, files


def test_the_same_contents_elsewhere_are_the_same(tmp_path):
    digest = fingerprint(*written(tmp_path / "one", b"abc", b"", b"de"))
    assert fingerprint(*written(tmp_path / "two", b"abc", b"", b"de")) == digest
    assert fingerprint(*written(tmp_path / "cut elsewhere", b"ab", b"", b"cde")) != digest


@pytest.mark.parametrize("size", [1, SAMPLE_BYTES, SAMPLE_BYTES + 1, SAMPLES * SAMPLE_BYTES])
def test_up_to_4_mib_every_byte_counts(size, tmp_path):
    first, second = os.urandom(size), os.urandom(size // 2)
    index, files = written(tmp_path / "x", first[: size - len(second)], second)
    before = fingerprint(index, files)
    for path in files:
        for place in (
            {0, path.stat().st_size // 2, path.stat().st_size - 1} if path.stat().st_size else set()
        ):
            content = bytearray(path.read_bytes())
            content[place] ^= 1
            path.write_bytes(content)
            assert fingerprint(index, files) != before, (path, place)
            content[place] ^= 1
            path.write_bytes(content)
    assert fingerprint(index, files) == before
    index.write_bytes(b"other")
    os.utime(index, ns=(1, 1))  # the clock may be too coarse to tell two writes of one size apart
    assert fingerprint(index, files) != before


def test_of_a_terabyte_no_more_is_read_and_both_ends_count(tmp_path):
    """A sparse file takes no room; reading all of it would take many minutes."""
    index, (path,) = written(tmp_path / "x", b"")
    os.truncate(path, 1 << 40)
    before = fingerprint(index, [path])
    for place in (0, (1 << 40) - 1, 21 * ((1 << 40) - SAMPLE_BYTES) // (SAMPLES - 1)):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        after = fingerprint(index, [path])
        assert after != before
        before = after
    os.truncate(path, (1 << 40) - 1)
    assert fingerprint(index, [path]) != before


def test_a_folder_of_latents_is_known_by_its_latents_and_its_labels(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 1, 2, 2), np.float32))
    np.save(tmp_path / "b.npy", np.zeros(2, np.int64))
    shard = '{"latents": "a.npy", "labels": "b.npy", "samples": 2}'
    (tmp_path / "index.json").write_text(
        f'{{"version": 1, "shape": [1, 2, 2], "dtype": "float32", "shards": [{shard}]}}'
    )
    digest = latents_fingerprint(tmp_path)
    np.save(tmp_path / "b.npy", np.ones(2, np.int64))
    two = latents_fingerprint(tmp_path)
    np.save(tmp_path / "a.npy", np.ones((2, 1, 2, 2), np.float32))
    assert len({digest, two, latents_fingerprint(tmp_path)}) == 3
