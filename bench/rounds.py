"""What benches share: turns that contestants take, flags, targets, and a GPU that is asked for."""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.errors import UserError
from tools.arguments import positive
from tools.report import write_records

FEWEST = 3
"""Rounds that are done whatever they take."""
SIZES = {
    "seq_length": "tokens",
    "batch": "sequences",
    "num_heads": "query heads",
    "kv_heads": "key and value heads; by default as many as query heads",
    "head_dim": "width of a head",
}


def turns(names: Sequence[str], repeats: int, most: float = math.inf, least: float = 0.0) -> Iterator[str]:
    """Yield all names in every round, each time from another one on, so that none always follows the same one.

    Args:
        repeats: rounds, and more until ``least`` seconds are over.
        most: seconds beyond which a round after the third is not begun.
    """
    start, done = time.monotonic(), 0
    while True:
        spent = time.monotonic() - start
        if (done >= FEWEST and spent + spent / done > most) or (done >= repeats and spent >= least):
            return
        first = done % len(names)
        yield from (*names[first:], *names[:first])
        done += 1


def add_sizes(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """Add flags of an attention's sizes, fields of a ``Workload``."""
    for name, default in defaults.items():
        help = SIZES[name] + (" (default: %(default)s)" if default else "")
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default, metavar="N", help=help)


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes that ``add_sizes``'s flags give."""
    found = {name: getattr(args, name) for name in SIZES if hasattr(args, name)}
    return found | {"kv_heads": found.get("kv_heads") or found["num_heads"]}


def add_rounds(parser: argparse.ArgumentParser, repeats: int, max_seconds: float) -> None:
    """Add how often contestants are timed."""
    parser.add_argument("--repeats", type=positive, default=repeats, help="rounds of all (default: %(default)s)")
    most = "no further round after this long, but for three (default: %(default)s)"
    parser.add_argument("--max-seconds", type=float, default=max_seconds, metavar="SECONDS", help=most)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add where figures are written besides, for ``keep``."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here too, as JSON lines")


def keep(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write a result where ``add_json``'s flag says."""
    if args.json:
        write_records(args.json, result)


def target(name: str, ratio: float, least: float | None, most: float | None = None) -> dict[str, Any]:
    """Return a figure, what it is to be, and whether it is."""
    met = (least or 0) <= ratio <= (most or math.inf)
    return {"name": name, "ratio": ratio, "bound": f"<= {most}" if least is None else f">= {least}", "met": met}


def said(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each target."""
    return [f"{t['name']} {t['bound']}: {t['ratio']:.3f}, {'met' if t['met'] else 'MISSED'}" for t in targets]


def need_cuda(device: str) -> None:
    """Raise UserError if the device is a GPU, and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("this needs a CUDA GPU, and torch sees none here; nothing was written")
