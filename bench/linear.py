"""Measure linear against quadratic attention over the length of a sequence, on one CPU thread.

Three ways to attend, forward + backward, each to one causal sequence of the same q, k and v:

    chunked  linear attention with decay, 64 tokens at a time (kernels/linear_attention.py),
             the form that trains
    naive    the same numbers from all T x T scores at once (kernels/reference.py)
    softmax  torch's scaled_dot_product_attention, which computes every score and saves none

The rate of chunked (tokens per second) stays level, and the rates of the other two halve with each
doubling of the length, so beyond some length chunked is faster; the last lines print that length.
naive stops at the length at which the T x T scores and decays that it saves for its backward pass
would exceed 1 GiB. The three take turns at each length, so that other load on the machine slows all
of them equally, and chunked must equal naive before it is timed. The medians are compared.

    # 256 to 16384 tokens, 4 heads of 32 (about a minute)
    python -m bench.linear
    python -m bench.linear --num-heads 8 --head-dim 64 --max-length 8192
    python -m bench.linear --results elsewhere --picture elsewhere/linear.png
"""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.harness import (
    add_outputs,
    add_rounds,
    add_sizes,
    check_same,
    clocked,
    fingerprint,
    forward_backward,
    measured,
    sizes_of,
)
from kernels import reference
from kernels.linear_scan import SCAN_CHUNK
from kernels.ops import linear_attention
from model.parts.attention import sdpa
from model.parts.linear_attention import alibi_slopes
from runtime.errors import UserError
from runtime.machine import describe, results_file
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import PALETTE, Column, Table, plain, write_records
from tools.common.shapes import AttentionShape

OURS = "chunked"
LABELS = {
    OURS: "linear, in chunks",
    "naive": "linear, all scores at once",
    "softmax": "softmax (SDPA)",
}
"""Contestants, with their names in the picture."""
SCORES_BYTES = 1 << 30
"""Maximum size of the T x T matrices that naive saves for the backward pass."""
SCANS = 4
"""Number of scans of the chunked form: one in the forward pass, and one each for dq, dk and dv."""
MINIMUM_SECONDS = 0.5
"""Minimum time for all contestants at one length; the shortest step takes a millisecond."""


def fits(work: AttentionShape) -> bool:
    """Return True if the scores and decays that naive saves do not exceed ``SCORES_BYTES``."""
    return 4 * (work.batch + 1) * work.num_heads * work.seq_length**2 <= SCORES_BYTES


def flops(name: str, work: AttentionShape) -> int:
    """Count the FLOPs of a contestant's matmuls, forward and backward; a multiply-add is two.

    softmax computes the unmasked half of the scores, in the forward pass and again in the backward
    pass. naive computes all scores once, and the final state. Each scan of chunked computes 64
    scores per token, and writes and reads the state.
    """
    width = work.head_dim
    rows = work.batch * work.num_heads
    if name == "softmax":
        return work.flops(work.pairs)
    if name == "naive":
        return work.flops(work.seq_length**2, products=6) + 2 * rows * work.seq_length * width**2
    padded_length = math.ceil(work.seq_length / SCAN_CHUNK) * SCAN_CHUNK
    return SCANS * 2 * rows * padded_length * width * (2 * SCAN_CHUNK + 2 * width)


def attend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute one contestant's output ``[B, T, H, D]``.

    The decays are those of a TransNormer's first layer.
    """
    if name == "softmax":
        return sdpa(q, k, v)
    log_decay = [-slope for slope in alibi_slopes(q.shape[2])]
    if name == "naive":
        return reference.linear_attention(q, k, v, log_decay)[0]
    return linear_attention(q, k, v, log_decay, backend="chunked")[0]


def steps_of(work: AttentionShape) -> dict[str, Callable[[], list[Tensor]]]:
    """Return a forward and backward step of each contestant that fits in memory, keyed by name.

    A step returns out, dq, dk and dv.
    """
    names = [name for name in LABELS if name != "naive" or fits(work)]
    return {name: forward_backward(partial(attend, name), *work.tensors()) for name in names}


def rows_at(work: AttentionShape, repeats: int, max_seconds: float) -> list[dict[str, Any]]:
    """Time the contestants at one length; return one row for each.

    Raises MeasureError if chunked differs from naive.
    """
    steps = steps_of(work)
    rows = []
    prints = {name: fingerprint(step()).tolist() for name, step in steps.items()}  # also warms up
    if "naive" in prints:
        check_same(OURS, prints[OURS], prints["naive"], work.dtype, "the naive form")
    clocks = {name: clocked(step) for name, step in steps.items()}
    for name, seconds in measured(clocks, repeats, max_seconds, MINIMUM_SECONDS).items():
        median_seconds = median(seconds)
        rows.append(
            {
                "name": name,
                "length": work.seq_length,
                "rounds": len(seconds),
                "median": median_seconds,
                "min": min(seconds),
                "max": max(seconds),
                "tokens_per_second": work.batch * work.seq_length / median_seconds,
            }
        )
    return rows


def lengths_between(shortest: int, longest: int) -> list[int]:
    """Return ``shortest`` times powers of two, up to ``longest``."""
    return [shortest << n for n in range(int(math.log2(longest / shortest)) + 1)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time the contestants at each length on one thread.

    Raises UserError if the maximum length is below the minimum.
    """
    if args.max_length < args.min_length:
        raise UserError(
            f"--max-length is {args.max_length}, but --min-length is {args.min_length}; give a"
            " longer --max-length"
        )
    shape = AttentionShape(seq_length=args.min_length, **sizes_of(args))
    load_average = list(os.getloadavg())
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for length in lengths_between(args.min_length, args.max_length):
            rows += rows_at(replace(shape, seq_length=length), args.repeats, args.max_seconds)
    finally:
        torch.set_num_threads(threads)
    sizes = asdict(shape)
    del sizes["seq_length"]
    return {
        "benchmark": "linear against quadratic attention over length, forward + backward, causal,"
        " one thread",
        "machine": describe("cpu"),
        "load_average": load_average,
        "shape": sizes,
        "rows": rows,
    }


def by_length(result: dict[str, Any], name: str) -> dict[int, dict[str, Any]]:
    """Return the rows of a contestant, keyed by length."""
    return {row["length"]: row for row in result["rows"] if row["name"] == name}


def overtakes(result: dict[str, Any], name: str) -> int | None:
    """Return the length from which chunked is faster than ``name``; None if there is none.

    It is faster at that length and at all longer ones at which both were measured.
    """
    chunked_rows = by_length(result, OURS)
    crossover = None
    for length, row in sorted(by_length(result, name).items()):
        if chunked_rows[length]["median"] >= row["median"]:
            crossover = None
        elif crossover is None:
            crossover = length
    return crossover


def exponent(result: dict[str, Any], name: str) -> float | None:
    """Return a contestant's growth exponent p, time ~ length^p, over its last two lengths.

    None if it has fewer than two lengths.
    """
    rows = [*by_length(result, name).values()]
    if len(rows) < 2:
        return None
    return math.log(rows[-1]["median"] / rows[-2]["median"]) / math.log(
        rows[-1]["length"] / rows[-2]["length"]
    )


def markdown(result: dict[str, Any]) -> str:
    """Format a table of tokens per second, then growth exponents and crossovers."""
    rates = {name: by_length(result, name) for name in LABELS}
    rows = []
    for length, chunked_row in rates[OURS].items():
        row = {name: rates[name].get(length, {}).get("tokens_per_second") for name in LABELS}
        row["length"] = length
        row["ratio"] = rates["softmax"][length]["median"] / chunked_row["median"]
        rows.append(row)
    columns: dict[str, Column] = {
        "tokens": "{length:,}",
        **{name: f"{{{name}:,.0f}}" for name in LABELS},
    }
    lines = [*Table(columns | {"chunked / softmax": "{ratio:.2f}"}, rows).markdown("---:"), ""]
    for name in LABELS:
        power = exponent(result, name)
        if power is not None:
            lines.append(f"{name}: time grows as length^{power:.2f} over its last step")
    for name in ("naive", "softmax"):
        start = overtakes(result, name)
        if start is None:
            lines.append(f"{OURS} is nowhere faster than {name}")
        else:
            lines.append(f"{OURS} is faster from {start:,} tokens on than {name}")
    return "\n".join(lines)


def picture(result: dict[str, Any], path: Path) -> None:
    """Plot tokens per second over length, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, label), colour, marker in zip(LABELS.items(), PALETTE, "osD", strict=False):
        rows = by_length(result, name)
        rates = [row["tokens_per_second"] for row in rows.values()]
        axes.plot(list(rows), rates, marker=marker, color=colour, label=label)
    tokens = list(by_length(result, OURS))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{length:,}" for length in tokens])
    shape = result["shape"]
    title = (
        f"forward + backward, {shape['num_heads']} heads of {shape['head_dim']}, {shape['dtype']},"
        " one thread"
    )
    axes.set(xlabel="tokens in the sequence", ylabel="tokens per second", title=title)
    plain(axes)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Time the contestants at each length; print the rates, and write them and their plot."""
    parser = parser_for("python -m bench.linear", __doc__)
    add = parser.add_argument
    add_sizes(parser, num_heads=4, head_dim=32, batch=1)
    add("--min-length", type=positive, default=256, help="shortest sequence (default: %(default)s)")
    add(
        "--max-length",
        type=positive,
        default=16384,
        help="longest sequence; lengths double (default: %(default)s)",
    )
    add_rounds(parser, 5, 15.0)
    add_outputs(parser, "linear", "linear_throughput.png")
    args = parser.parse_args(argv)
    result = measure(args)
    machine = result["machine"]
    path = results_file(args.results, "linear", machine)
    write_records(path, result)
    picture(result, args.picture)
    print(f"{machine['device']}, torch {machine['torch']}, one thread; tokens per second\n")
    print(markdown(result))
    print(f"written: {path}, {args.picture}")


if __name__ == "__main__":
    run_command(main)
