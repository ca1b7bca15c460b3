"""Check a GPU in steps: kernels against float64, all ranks of a plan on it, waits, rates, a run of 1B, a profile.

    make gpu-check
    make gpu-check ARGS="--steps environment backends"

One GPU, under 8 minutes. Each step is a process of its own, and its result is on the disk before the next begins, in
bench/results/<device>-check.jsonl; what cannot run here is skipped there, with the reason. Exit status 1 where
something is wrong, or where there is no GPU (then nothing is written). With --device cpu the same steps are small, to
try them.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.errors import MeasureError
from bench.gpu_steps import ROOT, STEPS, SkippedStep
from bench.rounds import need_cuda
from testing.machine import describe, device_name, slug
from testing.records import write_records
from tools.arguments import one_line_errors, parser_for, run_command

RESULTS = ROOT / "bench" / "results"


def of_step(name: str, device: str, limit: float) -> dict[str, Any]:
    """Run a step in a process of its own; return its figures, or why it ``failed``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "bench.gpu_check", "--device", device, "--in-process", name, str(out)]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=limit, stderr=subprocess.PIPE, text=True, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {limit:.0f} s"}
        sys.stderr.write(done.stderr)
        if not out.exists():
            return {"failed": (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def in_process(name: str, device: str, out: Path) -> None:
    """Run a step here, and write its figures."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = STEPS[name].run(device, Path(folder))
        except SkippedStep as reason:
            found = {"not_run": str(reason)}
        except ModuleNotFoundError as error:
            found = {"not_run": f"{error.name} is not installed"}
    out.write_text(json.dumps(found))


def verdict(found: dict[str, Any]) -> str:
    """Say in a line how a step ended."""
    for word in ("failed", "not_run"):
        if word in found:
            return f"{word.replace('_', ' ')}: {found[word]}"
    if found.get("wrong"):
        return f"WRONG: {'; '.join(found['wrong'][:3])}"
    shown = {name: value for name, value in found.items() if isinstance(value, int | float) and name != "seconds"}
    return "right" + "".join(f", {name} {value:.4g}" for name, value in shown.items())


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.gpu_check", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS), help="of %(choices)s")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="default: bench/results")
    parser.add_argument(
        "--in-process", nargs=2, metavar=("STEP", "FILE"), help="a step alone, here; writes its figures"
    )
    args = parser.parse_args(argv)
    need_cuda(args.device)
    if args.in_process:
        in_process(args.in_process[0], args.device, Path(args.in_process[1]))
        return
    path = args.output / f"{slug(device_name(args.device))}-check.jsonl"
    steps: dict[str, dict[str, Any]] = {}
    for name in args.steps:
        print(f"{name}: {(STEPS[name].run.__doc__ or '').splitlines()[0]}", flush=True)
        start = time.monotonic()
        steps[name] = of_step(name, args.device, STEPS[name].limit)
        steps[name]["seconds"] = time.monotonic() - start
        write_records(path, {"benchmark": "gpu-check", "machine": describe(args.device), "steps": steps})
        print(f"{name}: {verdict(steps[name])} ({steps[name]['seconds']:.0f} s)", flush=True)
    print(f"written: {path}")
    if bad := [name for name, found in steps.items() if "failed" in found or found.get("wrong")]:
        raise MeasureError(f"not as it must be: {', '.join(bad)}; {path} says what")


if __name__ == "__main__":
    run_command(main)
