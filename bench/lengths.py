"""Contestants over the length of a sequence, on one CPU thread and in turns, and which is faster where."""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.harness import add_rounds, add_sizes, check_same, clocked, fingerprint, measured, sizes_of
from bench.shapes import AttentionShape
from runtime.errors import UserError
from runtime.machine import OtherLoad, describe, results_file, usable_cores
from tools.common.arguments import parser_for, positive
from tools.common.report import write_records

OURS = "chunked"
Step = Callable[[], list[Tensor]]


def parser_of(name: str, description: str | None, shortest: int, longest: int, **sizes: Any) -> argparse.ArgumentParser:
    """Return a bench's parser, with lengths, rounds, default sizes of heads and where results go."""
    parser = parser_for(f"python -m bench.{name}", description)
    add, max_seconds = parser.add_argument, sizes.pop("max_seconds")
    add_sizes(parser, **sizes, batch=1)
    add("--min-length", type=positive, default=shortest, help="shortest sequence (default: %(default)s)")
    add("--max-length", type=positive, default=longest, help="longest; they double (default: %(default)s)")
    add_rounds(parser, 5, max_seconds)
    where = f"where {name}-MACHINE.jsonl goes (default: %(default)s)"
    add("--results", type=Path, default=Path("bench/results"), metavar="FOLDER", help=where)
    return parser


def measure(
    args: argparse.Namespace,
    benchmark: str,
    steps_of: Callable[[AttentionShape], Mapping[str, Step]],
    truth: tuple[str, str],
    least: float = 0.0,
) -> dict[str, Any]:
    """Time the contestants of each length, which ``steps_of`` makes, as the flags of ``parser_of`` say.

    Args:
        truth: the contestant, where it takes part, that ours must equal, and its name in an error.
        least: seconds of all contestants at a length.

    Raises UserError: lengths that are none; MeasureError: ours differs from the truth in out or a gradient.
    """
    if args.max_length < args.min_length:
        raise UserError(f"--max-length is {args.max_length}; it must be --min-length, {args.min_length}, or more")
    shape = AttentionShape(seq_length=args.min_length, **sizes_of(args))
    threads, others, began, rows = torch.get_num_threads(), OtherLoad(usable_cores()), time.process_time(), []
    torch.set_num_threads(1)
    try:
        for length in lengths_between(args.min_length, args.max_length):
            steps = steps_of(replace(shape, seq_length=length))
            prints = {name: fingerprint(step()).tolist() for name, step in steps.items()}  # also warms up
            if truth[0] in prints:
                check_same(OURS, prints[OURS], prints[truth[0]], shape.dtype, truth[1])
            clocks = {name: clocked(step) for name, step in steps.items()}
            seconds = measured(clocks, args.repeats, args.max_seconds, least)
            rows += [{"name": name, "length": length, **summary(taken)} for name, taken in seconds.items()]
    finally:
        torch.set_num_threads(threads)
    taken = others.cores_taken(time.process_time() - began)
    return {
        "benchmark": benchmark,
        "machine": describe("cpu"),
        "load": {"cores_taken_by_others": taken},
        "shape": {name: value for name, value in asdict(shape).items() if name != "seq_length"},
        "rows": rows,
    }


def summary(seconds: list[float]) -> dict[str, Any]:
    """Return a row's figures."""
    return {"rounds": len(seconds), "median": median(seconds), "min": min(seconds), "max": max(seconds)}


def lengths_between(shortest: int, longest: int) -> list[int]:
    """Return ``shortest`` times powers of two, up to ``longest``."""
    return [shortest << n for n in range(int(math.log2(longest / shortest)) + 1)]


def by_length(result: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Return the rows of a contestant by length."""
    return {row["length"]: row for row in result["rows"] if row["name"] == name}


def overtakes(result: dict[str, Any], name: str) -> int | None:
    """Return the length from which ours is faster than ``name`` at all lengths measured of both; None if never."""
    ours, theirs = by_length(result, OURS), by_length(result, name)
    slower = [n for n in theirs if ours[n]["median"] >= theirs[n]["median"]]
    return min((n for n in theirs if n > max(slower, default=0)), default=None)


def overtaking(result: dict[str, Any], name: str) -> str:
    """Say where ours is faster than ``name``."""
    start = overtakes(result, name)
    where = "nowhere faster" if start is None else f"faster from {start:,} tokens on"
    return f"{OURS} is {where} than {name}"


def write(args: argparse.Namespace, name: str, result: dict[str, Any]) -> Path:
    """Write a result into its file; return the path."""
    path = results_file(args.results, name, result["machine"])
    write_records(path, result)
    return path
