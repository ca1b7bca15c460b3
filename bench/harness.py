"""Shared benchmark harness: interleaved contestants, flags, targets, errors, a CUDA check."""

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

FEWEST = 3
"""Rounds that are done whatever they take."""
SETTLE_SECONDS = 0.02  # OpenMP threads spin for a moment after their work ends
SIZES = {
    "seq_length": "tokens",
    "batch": "sequences",
    "num_heads": "query heads",
    "kv_heads": "key and value heads; by default as many as query heads",
    "head_dim": "width of a head",
}
Figure = TypeVar("Figure")


class MeasureError(UserError):
    """A contestant failed, or computes something else than it should; its time would mean nothing."""


@contextmanager
def as_measure_errors(of: str = "") -> Iterator[None]:
    """Raise a rank's failure in the block as a MeasureError: the last line, and which file has its
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
        raise MeasureError(of + message) from None


def measured(
    contestants: Mapping[str, Callable[[], Figure]],
    repeats: int,
    max_seconds: float = math.inf,
    min_seconds: float = 0.0,
) -> dict[str, list[Figure]]:
    """Let contestants take turns, so that what else the machine does hits all alike; return each
    one's figures.

    Each round begins with another one, so that none always follows the same one.

    Args:
        contestants: calls that return a figure of one step, such as its seconds; ``clocked`` makes
            one of a step.
        repeats: rounds, and more until ``min_seconds`` are over.
        max_seconds: after these no round after the third is begun.
    """
    names, start, rounds = [*contestants], time.monotonic(), 0
    figures: dict[str, list[Figure]] = {name: [] for name in names}
    while True:
        spent = time.monotonic() - start
        if rounds >= FEWEST and spent + spent / rounds > max_seconds:
            return figures
        if rounds >= repeats and spent >= min_seconds:
            return figures
        first = rounds % len(names)
        for name in (*names[first:], *names[:first]):
            time.sleep(SETTLE_SECONDS)
            figures[name].append(contestants[name]())
        rounds += 1


def clocked(step: Callable[[], object]) -> Callable[[], float]:
    """Return a call that runs a step of this process and returns its seconds."""

    def seconds() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return seconds


def forward_backward(attend: Callable[..., Tensor], *given: Tensor) -> Callable[[], list[Tensor]]:
    """Return a step that attends forward and backward: out, and the gradients of what it takes.

    ``given`` are the tensors that it takes, of which some may not count, and last the gradient of
    out.
    """
    *tensors, dout = given
    leaves = [x.requires_grad_() for x in tensors]

    def step() -> list[Tensor]:
        out = attend(*leaves)
        return [
            out.detach(),
            *(
                x
                for x in torch.autograd.grad(out, leaves, dout, allow_unused=True)
                if x is not None
            ),
        ]

    return step


def add_sizes(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """Add flags of an attention's sizes, fields of an ``AttentionShape``."""
    for name, default in defaults.items():
        help = SIZES[name] + (" (default: %(default)s)" if default else "")
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=positive, default=default, metavar="N", help=help
        )


def sizes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes that ``add_sizes``'s flags give."""
    sizes = {name: getattr(args, name) for name in SIZES if hasattr(args, name)}
    return sizes | {"kv_heads": sizes.get("kv_heads") or sizes["num_heads"]}


def add_rounds(parser: argparse.ArgumentParser, repeats: int, max_seconds: float) -> None:
    """Add how often contestants are timed."""
    parser.add_argument(
        "--repeats", type=positive, default=repeats, help="rounds of all (default: %(default)s)"
    )
    limit = "no further round after this long, but for three (default: %(default)s)"
    parser.add_argument(
        "--max-seconds", type=float, default=max_seconds, metavar="SECONDS", help=limit
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add where figures are written besides, for ``write_json``."""
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write every figure here too, as JSON lines"
    )


def write_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write a result where ``add_json``'s flag says."""
    if args.json:
        write_records(args.json, result)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add where tables and figures are written, and a remark for them."""
    what = "write JSON lines and Markdown here too, named after the machine"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=what)
    parser.add_argument(
        "--note", help="a remark for the results, such as what else the machine was doing"
    )


def heading(result: dict[str, Any]) -> list[str]:
    """Return lines that say where figures were measured, and when."""
    note = [f"Note: {result['note']}."] if result["note"] else []
    load = f"load average at the end {result['load_average'][0]:.1f}"
    return [f"{in_words(result['machine'])}; {load}.", *note, ""]


def target(
    name: str, ratio: float, lower: float | None, upper: float | None = None
) -> dict[str, Any]:
    """Return a figure, what it is to be, and whether it is."""
    met = (lower or 0) <= ratio <= (upper or math.inf)
    return {
        "name": name,
        "ratio": ratio,
        "bound": f"<= {upper}" if lower is None else f">= {lower}",
        "met": met,
    }


def format_targets(targets: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each target."""
    return [
        f"{t['name']} {t['bound']}: {t['ratio']:.3f}, {'met' if t['met'] else 'MISSED'}"
        for t in targets
    ]


def need_cuda(device: str) -> None:
    """Raise UserError if the device is a GPU, and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("this needs a CUDA GPU, and torch sees none here; nothing was written")


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, float64 ``[len(tensors)]``, by which to compare
    computations.
    """
    return torch.stack([x.double().square().sum() for x in tensors])


MISMATCH = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative difference of a fingerprint beyond which two computations count as different."""


def check_same(
    name: str,
    got: list[float],
    want: list[float],
    dtype: str,
    truth: str = "scaled_dot_product_attention",
) -> None:
    """Refuse to time what does not compute the same as ``truth``.

    Raises MeasureError: the fingerprints differ by more than ``MISMATCH``.
    """
    if not all(
        abs(a - b) <= MISMATCH[dtype] * abs(b) for a, b in zip(got, want, strict=True)
    ):  # a nan differs
        raise MeasureError(
            f"{name} computes something else than {truth}: the squares of out, dq, dk, dv sum to {got} and should sum "
            f"to {want}; its time would mean nothing"
        )
