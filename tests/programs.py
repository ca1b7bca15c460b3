"""Programs that a test can start: those of a bare machine, and those that its marks name.

``@pytest.mark.needs("gcc", "as", "ld")`` adds them to the PATH of a test and its fixtures, and skips it where one is
not installed, or for the reason that ``unless()`` returns.
"""

import os
import shlex
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

BARE = (
    "awk basename bash cat chmod cp cut date diff dirname echo env false find getent grep head hostname id kill ln ls "
    "make mkdir mktemp mount mv nsenter paste printf pwd readlink realpath rm rmdir sed seq setpriv sh sha256sum "
    "sleep sort tail tee test timeout touch tr true umount uname uniq unshare wc xargs"
)
"""Make, and of the packages that every Debian has what something here starts."""
FOLDER, OUTSIDE = "LONGMESH_TEST_PROGRAMS", "LONGMESH_TEST_OUTSIDE"
"""Variables with the folder of links, and with the PATH that pytest was started with, which its workers do not see."""


def hide_others(folder):
    """Leave this process and those that it starts the programs of a bare machine, linked in ``folder``."""
    outside = os.environ.setdefault(OUTSIDE, os.environ["PATH"])
    bare = folder / "bare"
    offer(bare, BARE.split(), outside)
    for name in ("python3", "python"):
        if found := shutil.which(name, path=outside):  # no link: an environment is found beside its interpreter
            (bare / name).write_text(f'#!/bin/sh\nexec {shlex.quote(found)} "$@"\n')
            (bare / name).chmod(0o755)
    os.environ.update({FOLDER: str(folder), "PATH": str(bare)})


def offer(folder, programs, outside):
    """Link those programs into ``folder`` that the PATH ``outside`` has."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in programs:
        if (found := shutil.which(name, path=outside)) and not (folder / name).exists():
            (folder / name).symlink_to(found)


def hide_again():
    """Leave the processes that this one starts the programs of a bare machine, as ``hide_others`` did."""
    os.environ["PATH"] = f"{os.environ[FOLDER]}/bare"


def named(item):
    """Return the programs that a test's marks name."""
    return sorted({name for mark in item.iter_markers("needs") for name in mark.args})


@contextmanager
def offered(item):
    """Offer a test and its fixtures what its marks name."""
    if programs := named(item):
        more = Path(os.environ[FOLDER], "-".join(programs))
        offer(more, programs, os.environ[OUTSIDE])
        os.environ["PATH"] += f":{more}"
    try:
        yield
    finally:
        hide_again()


def on_path(body):
    """Let ranks that call ``body`` start what this test may: the server that forks them hides it."""
    return partial(_on_path, os.environ["PATH"], body)


def _on_path(path, body, *given):
    os.environ["PATH"] = path
    return body(*given)


def skip_without(item):
    """Skip a test where a program that it names is not installed, or something else that its marks ask for."""
    if absent := [name for name in named(item) if shutil.which(name) is None]:
        pytest.skip(f"there is no {', '.join(absent)}")
    for mark in item.iter_markers("needs"):
        if why := mark.kwargs.get("unless", str)():
            pytest.skip(why)
