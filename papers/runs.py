"""Runs of a table that is trained here: each is written as it ends, and a table that was begun is
resumed.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.machine import commit_of, describe, stamp
from tools.common.report import read_records, write_records

Result = dict[str, Any]
"""The settings, the machine of the first runs, and each finished run's figures by name, with its
date and commit.
"""


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line for options by their names."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def commit_told(commit: str) -> str:
    """Return a run's commit in words, and that it is another than this one, if it is."""
    other = (
        ""
        if commit == commit_of().removesuffix(" with changes")
        else ", ANOTHER COMMIT than this one"
    )
    return f"commit {commit}{other}"


def read_runs(path: Path, settings: dict[str, Any] | None = None) -> Result:
    """Read a file of results; no runs if it does not exist.

    Raises UserError: it has no settings of runs, or others than ``settings``, where these are
    given.
    """
    result: Result = {"runs": {}, **(read_records(path) if path.exists() else {})}
    if path.exists() and "settings" not in result:
        raise UserError(f"{path} holds no settings of runs; give another --results")
    if settings is not None and result.setdefault("settings", settings) != settings:
        raise UserError(
            f"{path} holds runs of {result['settings']}, not of {settings}; give another --results"
        )
    return result


def keep_run(
    result: Result, path: Path, name: str, measured: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Measure a run, write it to ``path`` with the others, and return it."""
    result.setdefault("machine", describe("cpu"))
    start = time.perf_counter()
    run = measured()
    run |= {"seconds": time.perf_counter() - start, **stamp()}
    result["runs"][name] = run
    write_records(path, result)
    return run


def run_all(main: Callable[[list[str]], int]) -> None:
    """Run a command that keeps its runs, with its lines on stderr. Raises UserError: it did not end
    well.
    """
    with redirect_stdout(sys.stderr):
        status = main([])
    if status:
        raise UserError("the runs did not end well; the reason stands above")
