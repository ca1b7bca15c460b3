"""Steps of a check, each a process of its own, whose results are on the disk as they end."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import MeasureError, format_targets
from runtime.errors import UserError
from runtime.machine import ROOT, describe, device_name, slug
from tests.starts import torchrun
from tools.common.report import write_records

RESULTS = ROOT / "bench" / "results"
SHOWN = 3
"""Cases that are wrong of a step that its line names; the file has all."""


class SkippedStep(UserError):
    """A step lacks something here; the message says what."""


class Step(NamedTuple):
    """A step, and the seconds after which it is ended."""

    run: Callable[[str, Path], dict[str, Any]]
    limit: float


def of_step(command: list[str], limit: float) -> dict[str, Any]:
    """Run a step by its command, and return its figures, or why it ``failed``.

    The command is given a file to write.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        try:
            status, printed = ended([*command, str(out)], limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {limit:.0f} s"}
        sys.stderr.write(printed)
        if not out.exists():
            return {"failed": (printed.strip().splitlines() or [f"ended with status {status}"])[-1]}
        record: dict[str, Any] = json.loads(out.read_text())
        return record


def ended(command: list[str], limit: float, stdout: int | None = None) -> tuple[int, str]:
    """Run a command to its end; return its status and what it wrote to stderr.

    ``stdout`` is as of ``Popen``.

    Whatever ends it, what it started ends too: ranks that hang would keep the devices that the next
    step needs.

    Raises TimeoutExpired: it took longer than ``limit`` seconds.
    """
    streams: dict[str, Any] = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **streams, start_new_session=True) as process:
        try:
            output = process.communicate(timeout=limit)[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # ranks have sessions of their own, and end with their torchrun
    return process.returncode, output


def in_process(step: Step, device: str, out: Path) -> None:
    """Run a step here, and write its figures."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            record = step.run(device, Path(folder))
        except SkippedStep as reason:
            record = {"not_run": str(reason)}
        except ModuleNotFoundError as error:
            record = {"not_run": f"{error.name} is not installed"}
    out.write_text(json.dumps(record))


def verdict(result: dict[str, Any]) -> str:
    """Say in a line how a step ended."""
    for word in ("failed", "not_run"):
        if word in result:
            return f"{word.replace('_', ' ')}: {result[word]}"
    if result.get("wrong"):
        more = len(result["wrong"]) - SHOWN
        return f"WRONG: {'; '.join(result['wrong'][:SHOWN])}" + (
            f"; and {more} more" if more > 0 else ""
        )
    missed = [
        missed_target
        for missed_target in format_targets(result.get("targets", ()))
        if missed_target.endswith("MISSED")
    ]
    shown = {
        name: value
        for name, value in result.items()
        if isinstance(value, int | float) and name != "seconds"
    }
    return (
        "right"
        + "".join(f", {name} {value:.4g}" for name, value in shown.items())
        + "".join(f"; {missed_target}" for missed_target in missed)
    )


def asked(
    parser: argparse.ArgumentParser,
    steps: Iterable[str],
    argv: list[str] | None,
    more: Iterable[str] = (),
) -> argparse.Namespace:
    """Read the command line of a check, with the flags that every check has.

    ``more`` are steps that must be named.
    """
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    help_text = "which of %(choices)s to run; default: all" + (
        f" but {', '.join(more)}" if more else ""
    )
    parser.add_argument(
        "--steps", nargs="+", choices=[*steps, *more], default=list(steps), help=help_text
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="default: bench/results"
    )
    parser.add_argument(
        "--in-process",
        nargs=2,
        metavar=("STEP", "FILE"),
        help="a step alone, here; writes its figures",
    )
    return parser.parse_args(argv)


def check(
    program: str, label: str, args: argparse.Namespace, steps: dict[str, Step], *more: str
) -> None:
    """Run the steps asked for, and write all results as each ends.

    Each is run by ``program`` with the flags ``more``.

    Raises MeasureError: a step failed, or found something wrong.
    """
    if args.in_process:
        in_process(steps[args.in_process[0]], args.device, Path(args.in_process[1]))
        return
    path = args.output / f"{slug(device_name(args.device))}-{label.removeprefix('gpu-')}.jsonl"
    results: dict[str, dict[str, Any]] = {}
    for name in args.steps:
        print(f"{name}: {(steps[name].run.__doc__ or '').splitlines()[0]}", flush=True)
        start = time.monotonic()
        command = [
            sys.executable,
            "-m",
            program,
            "--device",
            args.device,
            *more,
            "--in-process",
            name,
        ]
        results[name] = of_step(command, steps[name].limit)
        results[name]["seconds"] = time.monotonic() - start
        write_records(
            path, {"benchmark": label, "machine": describe(args.device), "steps": results}
        )
        print(f"{name}: {verdict(results[name])} ({results[name]['seconds']:.0f} s)", flush=True)
    print(f"written: {path}")
    if bad := [
        name for name, result in results.items() if "failed" in result or result.get("wrong")
    ]:
        raise MeasureError(f"not as it must be: {', '.join(bad)}; {path} says what")


def launched(processes: int, *command: str) -> tuple[int, str]:
    """Run a program under torchrun and print its lines as they come.

    Return its status and the lines.

    That is when all are gone that may print.
    """
    started: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*torchrun(processes), *command], cwd=ROOT, **started) as process:
        lines = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def tests(device: str, folder: Path, *chosen: str) -> dict[str, Any]:
    """Run tests marked gpu, or the same on a CPU.

    Count passed and skipped, and name those that failed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise SkippedStep("pytest is not installed")
    report, marked = folder / "report.xml", "gpu" if device == "cuda" else "not gpu"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        f"{marked} and not slow",
        f"--junitxml={report}",
        *chosen,
    ]
    command.append("--continue-on-collection-errors")
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if not report.exists():
        raise UserError("pytest ended without a report; see above")
    counts = count(report)
    if not counts["passed"] and not counts["wrong"]:
        raise SkippedStep(f"all {counts['skipped']} tests were skipped")
    return counts


def count(report: Path) -> dict[str, Any]:
    """Read the outcome from a JUnit file."""
    outcome: dict[str, Any] = {"passed": 0, "skipped": 0, "wrong": []}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            outcome["wrong"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            outcome["skipped" if "skipped" in tags else "passed"] += 1
    return outcome
