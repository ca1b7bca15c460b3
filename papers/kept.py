"""Runs kept in a file of results as each ends, so that the same command goes on where it stopped."""

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.machine import describe, stamp
from tools.common.report import read_records, write_records

Result = dict[str, Any]
"""The settings, the machine of the first runs, and each finished run's figures by name, with its date and commit."""


def kept(path: Path, settings: dict[str, Any] | None = None) -> Result:
    """Read a file of results; no runs if it does not exist.

    Raises UserError: it has no settings of runs, or others than ``settings``, where these are given.
    """
    result: Result = {"runs": {}, **(read_records(path) if path.exists() else {})}
    if path.exists() and "settings" not in result:
        raise UserError(f"{path} holds no settings of runs; give another --results")
    if settings is not None and result.setdefault("settings", settings) != settings:
        raise UserError(f"{path} holds runs of {result['settings']}, not of {settings}; give another --results")
    return result


def noted(result: Result, path: Path, name: str, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure a run, write it to ``path`` with the others, and return it."""
    result.setdefault("machine", describe("cpu"))
    start = time.perf_counter()
    found = result["runs"][name] = measured() | {"seconds": time.perf_counter() - start, **stamp()}
    write_records(path, result)
    return found


def run_all(main: Callable[[list[str]], int]) -> None:
    """Run a command that keeps its runs, with its lines on stderr. Raises UserError: it did not end well."""
    with redirect_stdout(sys.stderr):
        status = main([])
    if status:
        raise UserError("the runs did not end well; the reason stands above")
