"""The programs that tests see on the machine, and the default corpus, made once per session."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from data.text.prepare import Request, prepare
from runtime.files import owned
from runtime.machine import usable_cores
from runtime.ranks import preload
from tests import programs

preload("tests.preload")


def pytest_configure(config):
    folder = Path(tempfile.mkdtemp(prefix="longmesh-programs-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    programs.hide_others(folder)


def pytest_xdist_auto_num_workers():
    """Return one more than there are cores, at most 4: tests that start ranks wait for much of their time."""
    return min(len(usable_cores()) + 1, 4)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with programs.offered(item):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    programs.skip_without(item)


@pytest.fixture(scope="session")
def default_data(tmp_path_factory):
    """Prefix of the default corpus, the standard library's sources, with its tokenizer beside it.

    The first worker that asks makes it, once for all of them.
    """
    base = tmp_path_factory.getbasetemp()
    prefix = (base if "PYTEST_XDIST_WORKER" not in os.environ else base.parent) / "data" / "stdlib"
    with owned(prefix.parent.with_name("data-lock"), wait=True):
        if not prefix.parent.exists():
            draft = prefix.parent.with_name("data-draft")
            prepare(Request(), draft / prefix.name, progress=False)
            draft.rename(prefix.parent)
    return prefix
