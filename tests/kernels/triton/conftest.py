"""A fresh cache of compiled kernels for each test of Triton's."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing that a test compiles stays in the home folder, or comes from there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
