"""Shared parts of benchmarks: contestants that take turns, flags, targets, errors, checks."""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.machine import in_words
from runtime.ranks import RankError
from tools.common.arguments import positive
from tools.common.report import write_records

MIN_ROUNDS = 3
"""Number of rounds that are always measured, however long they take."""
SETTLE_SECONDS = 0.02  # pause: OpenMP threads still spin for a moment after their work
SIZES = {
    "seq_length": "number of tokens",
    "batch": "number of sequences",
    "num_heads": "number of query heads",
    "kv_heads": "number of key and value heads; by default as many as query heads",
    "head_dim": "channels per head",
}
Figure = TypeVar("Figure")


class MeasureError(UserError):
    """A contestant failed or computed a wrong result, so its time would be meaningless."""


@contextmanager
def as_measure_errors(prefix: str = "") -> Iterator[None]:
    """Turn a rank's failure inside the block into a MeasureError.

    The message has the last line of the traceback, and the path of the file with the whole
    traceback.
    """
    try:
        yield
    except RankError as error:
        message, *trace = str(error).strip().splitlines()
        if trace:
            with tempfile.NamedTemporaryFile(
                "w", prefix="longmesh-", suffix=".log", delete=False
            ) as log:
                log.write(str(error))
            message = f"{message} {trace[-1]}; its traceback is in {log.name}"
        raise MeasureError(prefix + message) from None


def measured(
    contestants: Mapping[str, Callable[[], Figure]],
    repeats: int,
    max_seconds: float = math.inf,
    min_seconds: float = 0.0,
) -> dict[str, list[Figure]]:
    """Let contestants take turns, and return the figures of each.

    Since they take turns, other load on the machine slows all of them equally. Each round starts
    with another contestant, so that none always follows the same one.

    Args:
        contestants: functions that run a step and return its figure, such as seconds; ``clocked``
            makes one from a step.
        repeats: number of rounds; more follow until ``min_seconds`` are over.
        max_seconds: a round does not start if it would probably end later than this, except the
            first three.
    """
    names = [*contestants]
    start = time.monotonic()
    rounds = 0
    figures: dict[str, list[Figure]] = {name: [] for name in names}
    while True:
        spent = time.monotonic() - start
        if rounds >= MIN_ROUNDS and spent + spent / rounds > max_seconds:
            return figures
        if rounds >= repeats and spent >= min_seconds:
            return figures
        first = rounds % len(names)
        for name in (*names[first:], *names[:first]):
            time.sleep(SETTLE_SECONDS)
            figures[name].append(contestants[name]())
        rounds += 1


def clocked(step: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs a step in this process and returns the seconds that it took."""

    def seconds() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return seconds


def forward_backward(attend: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Return a step of attention, forward and backward, that returns out and the gradients.

    ``tensors`` are the inputs and, last, the gradient of out. Unused inputs get no gradient.
    """
    *inputs, dout = tensors
    leaves = [x.requires_grad_() for x in inputs]

    def step() -> list[Tensor]:
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        return [out.detach(), *(x for x in gradients if x is not None)]

    return step


def add_sizes(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """Add flags for the sizes of an attention, which are fields of ``AttentionShape``."""
    for name, default in defaults.items():
        help = SIZES[name]
        if default:
            help += " (default: %(default)s)"
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=positive, default=default, metavar="N", help=help
        )


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes from the flags of ``add_sizes``."""
    sizes = {name: getattr(args, name) for name in SIZES if hasattr(args, name)}
    if not sizes.get("kv_heads"):
        sizes["kv_heads"] = sizes["num_heads"]
    return sizes


def add_rounds(parser: argparse.ArgumentParser, repeats: int, max_seconds: float) -> None:
    """Add flags for the number of rounds and the time that they may take."""
    parser.add_argument(
        "--repeats", type=positive, default=repeats, help="number of rounds (default: %(default)s)"
    )
    limit = (
        "seconds after which no further round begins, except the first three (default: %(default)s)"
    )
    parser.add_argument(
        "--max-seconds", type=float, default=max_seconds, metavar="SECONDS", help=limit
    )


def add_outputs(parser: argparse.ArgumentParser, name: str, picture: str) -> None:
    """Add flags for the folder of ``name``-MACHINE.jsonl and for the file of the plot."""
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("bench/results"),
        metavar="FOLDER",
        help=f"folder for {name}-MACHINE.jsonl (default: %(default)s)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("docs/images") / picture,
        metavar="FILE",
        help="file for the plot (default: %(default)s)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json, the file that ``write_json`` writes."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="file to which all figures are also written, as JSON lines",
    )


def write_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write a result to the file given by ``--json``, if any."""
    if args.json:
        write_records(args.json, result)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add --results, the folder to write results to, and --note, a remark to include in them."""
    results = "also write JSON lines and Markdown to this folder, named after the machine"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=results)
    parser.add_argument(
        "--note", help="a remark for the results, such as what else the machine was doing"
    )


def heading(result: dict[str, Any]) -> list[str]:
    """Return the first lines of a report: the machine, its load, and the remark of --note."""
    load = f"load average at the end {result['load_average'][0]:.1f}"
    lines = [f"{in_words(result['machine'])}; {load}."]
    if result["note"]:
        lines.append(f"Note: {result['note']}.")
    return [*lines, ""]


def target(
    name: str, ratio: float, lower: float | None, upper: float | None = None
) -> dict[str, Any]:
    """Compare a figure with its minimum or maximum; return a row for ``format_targets``."""
    met = (lower or 0) <= ratio <= (upper or math.inf)
    return {
        "name": name,
        "ratio": ratio,
        "bound": f"<= {upper}" if lower is None else f">= {lower}",
        "met": met,
    }


def format_targets(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each row of ``target``: its bound, its figure, and if it is met."""
    lines = []
    for row in targets:
        verdict = "met" if row["met"] else "MISSED"
        lines.append(f"{row['name']} {row['bound']}: {row['ratio']:.3f}, {verdict}")
    return lines


def need_cuda(device: str) -> None:
    """Raise UserError if the device is a GPU but there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda needs a CUDA GPU, but torch finds none; run this on a machine with a GPU"
        )


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, float64 ``[len(tensors)]``.

    Two computations with equal fingerprints count as the same.
    """
    return torch.stack([x.double().square().sum() for x in tensors])


MISMATCH = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative difference of a fingerprint beyond which two computations count as different, keyed by
dtype."""


def check_same(
    name: str,
    actual: list[float],
    reference: list[float],
    dtype: str,
    truth: str = "scaled_dot_product_attention",
) -> None:
    """Check that a contestant computes the same as ``truth``, before it is timed.

    ``actual`` and ``reference`` are the fingerprints of both. Raises MeasureError if they differ by
    more than ``MISMATCH``.
    """
    for actual_sum, reference_sum in zip(actual, reference, strict=True):
        if not abs(actual_sum - reference_sum) <= MISMATCH[dtype] * abs(
            reference_sum
        ):  # nan counts as different
            raise MeasureError(
                f"{name} does not compute the same as {truth}: the squares of out, dq, dk, dv sum"
                f" to {actual}, but should sum to {reference}; its time would mean nothing"
            )
