"""A fresh cache of compiled kernels for each test of Triton's.

One run of its interpreter serves all.
"""

import json
import os

import pytest

from runtime.files import owned


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing that a test compiles stays in the home folder, or comes from there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory):
    """The reports of the interpreter; the first worker that asks runs it, once for all of them."""
    from tests.kernels.triton.harness import interpret

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    reports = base / "interpreted.json"
    with owned(base / "interpreted-lock", wait=True):
        if not reports.exists():
            reports_by_kernel = interpret("attention", "pointwise", "linear", "delta")
            reports.with_suffix(".draft").write_text(json.dumps(reports_by_kernel))
            reports.with_suffix(".draft").rename(reports)
    return json.loads(reports.read_text())
