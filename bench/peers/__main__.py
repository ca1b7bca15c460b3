"""Measure the same work by us and by other packages, in one run, taking turns.

    make peers
    python -m bench.peers                                        # attention on 2 processes, then training in one
    python -m bench.peers --only attention --lengths 2048 4096

Attention: forward + backward, causal, 8 heads of 64 in float32, 2 processes pinned to a core each. Training: steps of
configs/llama_tiny.toml in one process with a thread for each core, ours as it is and with --compile. Every contestant
computes the same: outputs and gradients of the attention are compared before they are timed. A package that cannot run
here is listed with its reason.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from bench.attention import measure_cpu
from bench.peers.packages import PACKAGES, measurable, refusal, versions
from bench.peers.training import steps_of, timed
from bench.rounds import add_rounds
from bench.workload import Workload
from data.text.prepare import Request, prepare
from runtime.errors import UserError
from runtime.machine import describe, results_file, usable_cores
from tools.arguments import one_line_errors, parser_for, positive, run_command
from tools.report import write_records

OURS = ("zigzag", "striped")
CONFIG = Path("configs/llama_tiny.toml")
FLAGS: tuple[list[str], ...] = ([], ["--compile"])
"""More flags of our training, each measured."""


def attention(length: int, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Time our methods and the packages', forward and backward; a row as ``row``'s.

    Raises UserError, MeasureError: as ``bench.attention.measure_cpu``.
    """
    theirs = [f"ring@{name}" for name in measurable("attention")]
    found = measure_cpu(Workload(seq_length=length), (*OURS, *theirs), repeats=repeats, max_seconds=max_seconds)
    return {"length": length, **row({name: one["seconds"] for name, one in found["contestants"].items()}, OURS, theirs)}


def training(repeats: int, flags: list[str]) -> dict[str, Any]:
    """Time training steps of ours and of the packages; a row as ``row``'s."""
    packages = measurable("training")
    torch.set_num_threads(len(usable_cores()))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "stdlib"
        prepare(Request(), data, progress=False)
        with steps_of(packages, CONFIG, data, flags) as steps:
            return {"flags": flags, **row(timed(steps, repeats), ("longmesh",), packages)}


def row(seconds: dict[str, list[float]], ours: Sequence[str], theirs: Sequence[str]) -> dict[str, Any]:
    """Return medians and quartiles by contestant, and how many times as fast our fastest is as their fastest."""
    medians = {name: median(all_of) for name, all_of in seconds.items()}
    return {
        "median": medians,
        "quartiles": {name: quantiles(all_of, n=4, method="inclusive") for name, all_of in seconds.items()},
        "against_best": min(map(medians.__getitem__, theirs)) / min(map(medians.__getitem__, ours)) if theirs else None,
    }


def line_of(row: dict[str, Any]) -> str:
    """Show a row in a line."""
    spread = {name: f"({low:.3f} to {high:.3f})" for name, (low, _, high) in row["quartiles"].items()}
    times = ", ".join(f"{name} {middle:.3f} s {spread[name]}" for name, middle in row["median"].items())
    ratio = "" if row["against_best"] is None else f"; our best is {row['against_best']:.2f} times as fast as theirs"
    return f"{row['length'] if 'length' in row else ' '.join(['training', *row['flags']])}: {times}{ratio}"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.peers", __doc__)
    parser.add_argument("--only", choices=("attention", "training"), help="measure this alone")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2048, 4096, 8192], metavar="N", help="tokens")
    add_rounds(parser, 9, 150)
    parser.add_argument("--results", type=Path, metavar="DIR", help="write them there too, as into bench/results")
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
    works: list[tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]] = []
    if args.only != "training":
        works += [("attention", attention, (length, args.repeats, args.max_seconds)) for length in args.lengths]
    if args.only != "attention":
        works += [("training", training, (args.repeats, more)) for more in FLAGS]
    for name, measured, given in works:
        found.setdefault(name, []).append(measured(*given))
        print(line_of(found[name][-1]), flush=True)
    if args.results:
        path = results_file(args.results, "peers", machine)
        write_records(path, found)
        print(f"written: {path}")


if __name__ == "__main__":
    run_command(main)
