"""Measure the same work by us and by other packages, in one run, taking turns.

    make peers
    python -m bench.peers                                        # attention on 2 processes, then training in one
    python -m bench.peers --only attention --lengths 2048 4096
    python -m bench.peers --only training --flags --context-parallel-method none

Attention: forward + backward, causal, 8 heads of 64 in float32, 2 processes pinned to a core each. Training: steps of
configs/llama_tiny.toml in one process with a thread for each core, ours as it is and with --compile. Every contestant
computes the same: outputs and gradients of the attention are compared before they are timed. A package that cannot run
here is listed with its reason.
"""

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from bench.peers.packages import PACKAGES, refusal, versions
from runtime.errors import UserError
from testing.machine import describe, results_file, usable_cores
from testing.records import write_records
from tools.arguments import one_line_errors, parser_for, positive, run_command

OURS = ("zigzag", "striped")
CONFIG = Path("configs/llama_tiny.toml")
RESULTS = Path("bench/results")


def attention(lengths: list[int], repeats: int, max_seconds: float) -> list[dict[str, Any]]:
    """Time our methods and the packages' at each length; a row has seconds by contestant, and our best against theirs.

    Raises UserError, MeasureError: as ``bench.attention.measure_cpu``.
    """
    from bench.attention import measure_cpu
    from bench.workload import Workload

    packages = [package.name for package in PACKAGES if "attention" in package.measures and refusal(package) is None]
    theirs = [f"ring@{name}" for name in packages]
    rows = []
    for length in lengths:
        found = measure_cpu(Workload(seq_length=length), (*OURS, *theirs), repeats=repeats, max_seconds=max_seconds)
        row = {"length": length, **_summary({name: one["seconds"] for name, one in found["contestants"].items()})}
        rows.append(row | {"against_best": _against(row, OURS, theirs)})
        print(line_of(rows[-1]), flush=True)
    return rows


def training(repeats: int, flags: list[str]) -> dict[str, Any]:
    """Time training steps of ours and of the packages; a row as ``attention``'s."""
    from bench.peers.training import steps_of, timed
    from data.text.prepare import Request, prepare

    packages = [package.name for package in PACKAGES if "training" in package.measures and refusal(package) is None]
    torch.set_num_threads(len(usable_cores()))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "stdlib"
        prepare(Request(), data, progress=False)
        with steps_of(packages, CONFIG, data, flags) as steps:
            row: dict[str, Any] = {"flags": flags, **_summary(timed(steps, repeats))}
    return row | {"against_best": _against(row, ("longmesh",), packages)}


def _summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return all seconds, medians and quartiles by contestant."""
    spread = {name: quantiles(all_of, n=4, method="inclusive") for name, all_of in seconds.items()}
    return {
        "median": {name: median(all_of) for name, all_of in seconds.items()},
        "quartiles": spread,
    }


def _against(row: dict[str, Any], ours: tuple[str, ...], theirs: list[str]) -> float | None:
    """Return how many times as fast our fastest is as their fastest; None without any."""
    medians = row["median"]
    return min(medians[name] for name in theirs) / min(medians[name] for name in ours) if theirs else None


def line_of(row: dict[str, Any]) -> str:
    """Show a row in a line."""
    times = ", ".join(f"{name} {_spread(row, name)}" for name in row["median"])
    ratio = "" if row["against_best"] is None else f"; our best is {row['against_best']:.2f} times as fast as theirs"
    return f"{row['length'] if 'length' in row else ' '.join(['training', *row['flags']])}: {times}{ratio}"


def _spread(row: dict[str, Any], name: str) -> str:
    low, _, high = row["quartiles"][name]
    return f"{row['median'][name]:.3f} s ({low:.3f} to {high:.3f})"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.peers", __doc__)
    parser.add_argument("--only", choices=("attention", "training"), help="measure this alone")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2048, 4096, 8192], metavar="N", help="tokens")
    parser.add_argument("--repeats", type=positive, default=9, help="rounds (default: %(default)s)")
    parser.add_argument("--max-seconds", type=float, default=150, help="for each length (default: %(default)s)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="the rest: more flags of our training")
    parser.add_argument("--results", type=Path, metavar="DIR", help=f"write them there too, as into {RESULTS}")
    args = parser.parse_args(argv)
    if args.repeats < 2:
        raise UserError(f"--repeats is {args.repeats}; it must be 2 or more, to have quartiles")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    absent = {package.name: why for package in PACKAGES if (why := refusal(package)) is not None}
    machine = describe("cpu")
    found: dict[str, Any] = {"benchmark": "peers", "machine": machine, "versions": versions(), "not_measured": absent}
    print(f"{machine['device']}, torch {machine['torch']}; {', '.join(map(' '.join, found['versions'].items()))}")
    for name, why in absent.items():
        print(f"not measured: {name}: {why}")
    if not found["versions"]:
        raise UserError("no other package is installed; make peers installs them")
    if args.only != "training":
        found["attention"] = attention(args.lengths, args.repeats, args.max_seconds)
    if args.only != "attention":
        found["training"] = []
        for flags in [args.flags] if args.flags else [[], ["--compile"]]:
            found["training"].append(training(args.repeats, flags))
            print(line_of(found["training"][-1]), flush=True)
    if args.results:
        path = results_file(args.results, "peers", machine)
        write_records(path, found)
        print(f"written: {path}")


if __name__ == "__main__":
    run_command(main)
