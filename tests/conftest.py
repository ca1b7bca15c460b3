"""What several tests need and what takes a while to make, once per session."""

from pathlib import Path

import pytest

from data.text.prepare import Request, prepare
from runtime.ranks import preload

preload("tests.preload")


@pytest.fixture(scope="session")
def default_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of the default corpus, the standard library's sources, with its tokenizer beside it."""
    prefix = tmp_path_factory.mktemp("data") / "stdlib"
    prepare(Request(), prefix, progress=False)
    return prefix
