"""Check a GPU: its tests, its measured ceilings and the attention on it, into bench/results/<device>.jsonl.

    make gpu-check

One GPU, under 8 minutes. Every figure is measured in this run; what could not be measured stands under "skipped" with
the reason. Exit status 1 where a test fails (the file tells), or where there is no GPU (then nothing is written).
"""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from bench import gpu
from bench.attention import DEFAULT_METHODS
from bench.errors import MeasureError
from bench.rounds import need_cuda
from bench.workload import Workload
from testing.machine import device_name, slug
from testing.records import write_records
from tools.arguments import one_line_errors, parser_for, run_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
TEST_SECONDS = 300
REPEATS = 20
WORK = Workload(seq_length=8192, num_heads=16, kv_heads=16, head_dim=128, dtype="bfloat16")
RANKS = 8


def run_tests(marker: str, limit: float, paths: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the tests with that marker; return counts of ``passed``, ``failed``, ``skipped``, and names of what failed.

    Raises MeasureError: it took longer than ``limit`` seconds, or ended without a report.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", marker, f"--junitxml={report}", *paths]
        start = time.monotonic()
        try:
            subprocess.run(command, cwd=ROOT, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise MeasureError(f"the tests marked {marker!r} took longer than {limit:.0f} s") from None
        if not report.exists():
            raise MeasureError(f"{' '.join(command)} ended without a report; see its output above")
        return count(report) | {"seconds": time.monotonic() - start}


def count(report: Path) -> dict[str, Any]:
    """Read the outcome from a JUnit file."""
    outcome: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": 0, "failures": []}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            outcome["failed"] += 1
            outcome["failures"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            outcome["skipped" if "skipped" in tags else "passed"] += 1
    return outcome


def write_result(folder: Path, tests: dict[str, Any], measured: dict[str, Any]) -> Path:
    """Write the device's file; return its path."""
    path = folder / f"{slug(measured['machine']['device'])}.jsonl"
    write_records(path, {"tests": tests, **measured})
    return path


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.gpu_check", __doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="default: bench/results")
    args = parser.parse_args(argv)
    need_cuda("cuda")
    print(f"{device_name('cuda')}: the tests that need a GPU", flush=True)
    tests = run_tests("gpu and not slow", TEST_SECONDS)
    print("the attention, and what the device can do at most", flush=True)
    measured = gpu.measure("cuda", WORK, gpu.LENGTHS, DEFAULT_METHODS, RANKS, REPEATS)
    print(gpu.table(measured))
    path = write_result(args.output, tests, measured)
    print(f"tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped; written: {path}")
    if tests["failed"] or not tests["passed"]:
        raise MeasureError(f"{tests['failed']} of the tests that need a GPU failed, {tests['passed']} passed")


if __name__ == "__main__":
    run_command(main)
