"""Files that change under a run are named: cut ones, and a cache whose indices lead out of them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.text.config import DataConfig
from data.text.indexed import TokenReader
from data.text.megatron import build_datasets
from runtime.errors import DataError
from tests.data.text.corpora import NumberTokenizer, counting_documents, write_documents


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_documents(tmp_path / "d", counting_documents(40))


@pytest.fixture
def train(prefix: str) -> Any:
    return build_datasets(DataConfig(data_path=(prefix,), split="90,10,0"), 16, 1234, NumberTokenizer())[0]


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_file_cut_under_a_run_is_named(prefix: str, train: Any, end: str) -> None:
    """A memory map of it would end the process by SIGBUS; a read of what is gone, hand out what was in memory."""
    train[0]
    path = Path(prefix + end)
    whole = path.stat().st_size
    os.truncate(path, whole // 2)
    for number in range(len(train)):
        with pytest.raises(DataError, match=rf"d\{end} has {whole // 2} bytes, and had {whole}: it was changed while"):
            train[number]
    os.truncate(path, whole)  # of zeros, which are token ids
    train[0]


def test_a_read_that_falls_short_is_named(prefix: str) -> None:
    reader = TokenReader(prefix)
    assert reader.read(np.uint16, 3, 0).tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"d\.bin has \d+ bytes, and had"):
        reader.read(np.uint16, 100, os.path.getsize(f"{prefix}.bin") - 10)


def test_a_shuffle_index_out_of_range_is_named(train: Any) -> None:
    """As a rank finds it that has not looked at the digests, or that was changed since."""
    train._epochs[0].shuffle_index = np.array(train._epochs[0].shuffle_index) + 10**6
    with pytest.raises(DataError, match=r"d\.bin: sample 3 is not in the file .* cache of sample indices is damaged"):
        train[3]
