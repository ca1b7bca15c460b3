"""Save the runs of a table whose figures come from training on this machine.

A table takes up to an hour on a CPU. Each run is written to the results file when it ends, so an
interrupted table resumes with the next run.
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
"""Contents of a results file: the settings, the machine of the first run, and, keyed by name, each
finished run's figures, date and commit."""


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return options, keyed by name, as the words of a command line."""
    words = []
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return words


def commit_note(commit: str) -> str:
    """Return text that names a run's commit, with a warning if it is not the current one."""
    if commit == commit_of().removesuffix(" with changes"):
        return f"commit {commit}"
    return f"commit {commit}, ANOTHER COMMIT than this one"


def read_runs(path: Path, settings: dict[str, Any] | None = None) -> Result:
    """Read a results file; if it does not exist, return a result without runs.

    Raises UserError if the file has no settings of runs, or others than the given ``settings``.
    """
    result: Result = {"runs": {}}
    if path.exists():
        result |= read_records(path)
        if "settings" not in result:
            raise UserError(
                f"{path} does not record the settings of its runs; give another --results"
            )
    if settings is not None and result.setdefault("settings", settings) != settings:
        raise UserError(
            f"{path} has runs with the settings {result['settings']}, not {settings}; give another "
            "--results"
        )
    return result


def keep_run(
    result: Result, path: Path, name: str, measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Measure a run, save it in ``path`` with the others, and return its figures."""
    result.setdefault("machine", describe("cpu"))
    start = time.perf_counter()
    run = measure()
    run |= {"seconds": time.perf_counter() - start, **stamp()}
    result["runs"][name] = run
    write_records(path, result)
    return run


def run_all(main: Callable[[list[str]], int]) -> None:
    """Call the ``main`` of a command that saves its runs, and print its output on stderr.

    Raises UserError if its status is not 0.
    """
    with redirect_stdout(sys.stderr):
        status = main([])
    if status:
        raise UserError("the runs failed; see the reason above")
