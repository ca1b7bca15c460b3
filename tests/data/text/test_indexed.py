"""`check_indexed` accepts what Megatron writes and names what is wrong with anything else."""

import struct
from pathlib import Path

import numpy as np
import pytest

from data.text.indexed import check_indexed, writing
from runtime.errors import DataError
from tests.data.text.corpora import counting_documents, write_documents

HEADER = 34


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "d", counting_documents(10))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_whole_files_pass(tmp_path, dtype):
    documents = [[1, 2, 3], [4], [5, 6]]
    indexed = check_indexed(write_documents(tmp_path / "d", documents, dtype), vocab_size=7)
    assert indexed.tokens == 6
    assert indexed.lengths.tolist() == [3, 1, 2]
    assert indexed.dtype == dtype
    assert indexed.token_ids().tolist() == [1, 2, 3, 4, 5, 6]


def cut(size):
    return lambda data: data[:size]


def patch(offset, content):
    return lambda data: data[:offset] + content + data[offset + len(content) :]


@pytest.mark.parametrize(
    ("end", "damage", "message"),
    [
        (".bin", None, r"d\.bin does not exist"),
        (".idx", None, r"d\.idx does not exist"),
        (".bin", cut(499), r"d\.bin has 499 bytes, but .* 250 tokens"),
        (".bin", cut(0), r"d\.bin has 0 bytes"),
        (".bin", lambda data: data + b"\0\0", r"d\.bin has 502 bytes"),
        (".idx", cut(0), "magic"),
        (".idx", cut(20), "cut off inside its header"),
        (".idx", cut(100), r"100 bytes, but 10 sequences and 11 document bounds need 242"),
        (".idx", patch(0, b"garbage!!"), "magic"),
        (".idx", patch(9, b"\2"), "version 2"),
        (".idx", patch(17, b"\7"), "dtype code 7"),
        (".idx", patch(17, b"\4"), r"d\.bin has 500 bytes, but .* tokens of 4 bytes"),
        (".idx", patch(18, struct.pack("<Q", 2**60)), "document bounds need"),
        (".idx", patch(18, struct.pack("<QQ", 0, 26)), "has no documents"),
        (".idx", patch(HEADER, struct.pack("<ii", 26, 24)), "has pointers that contradict"),
        (".idx", patch(HEADER, struct.pack("<ii", -1, 51)), "document 0 a negative length"),
        (".idx", patch(HEADER + 12 * 10 + 8, struct.pack("<q", 99)), "document bounds"),
    ],
)
def test_damage_is_named(prefix, end, damage, message):
    check_indexed(prefix, vocab_size=1000)
    path = Path(prefix + end)
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        check_indexed(prefix, vocab_size=1000)


def test_prefix_with_suffix_is_explained(prefix):
    with pytest.raises(DataError, match=r"prefix without \.bin or \.idx"):
        check_indexed(f"{prefix}.bin", vocab_size=1000)


@pytest.mark.parametrize(("bad", "dtype"), [(50, np.uint16), (-1, np.int32), (70_000, np.int32)])
@pytest.mark.parametrize("position", [0, 7, 19])
def test_id_outside_the_vocabulary(tmp_path, bad, dtype, position):
    documents = [[1] * 8, [2] * 12]
    documents[position >= 8][position if position < 8 else position - 8] = bad
    prefix = write_documents(tmp_path / "d", documents, dtype)
    with pytest.raises(
        DataError, match=rf"token id {bad} \(document {int(position >= 8)}, token {position} of"
    ):
        check_indexed(prefix, vocab_size=50)


def test_scan_reaches_head_and_tail(tmp_path):
    for position, seen_by_scan in (
        (0, True),
        (2, True),
        (3, False),
        (6, False),
        (7, True),
        (9, True),
    ):
        prefix = write_documents(tmp_path / "d", [[99 if i == position else 1 for i in range(10)]])
        if seen_by_scan:
            with pytest.raises(DataError, match="token id 99"):
                check_indexed(prefix, vocab_size=50, scan_tokens=3)
        else:
            check_indexed(prefix, vocab_size=50, scan_tokens=3)
    with pytest.raises(DataError, match="token 9 of the file"):
        check_indexed(prefix, vocab_size=50, scan_tokens=8)  # the two ranges overlap


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match=r"cannot write .*d\.bin"),
        writing(tmp_path / "file" / "d.bin"),
    ):
        pass
