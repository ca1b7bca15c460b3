"""Measure the attention: the context-parallel methods against each other, against one process,
against the limits.

On the CPU, in one run: ring, striped, zigzag and allgather on 2 processes pinned to one core each,
and torch's scaled_dot_product_attention in one process with a thread on each of the same cores;
forward + backward, causal. The contestants take turns, so that whatever else the machine does hits
all alike; a step lasts as long as its slowest rank. With packed documents or a window: zigzag,
striped, ring, and exchange and allgather over the layout balanced, with the gain over zigzag that
counted pairs promise and the share of it that is reached. With --alone also what a mask costs one
rank on one core: one document, documents of about 500 tokens, and one document under a window, each
through the plan and its tiles, beside torch's own of one document.

    python -m bench.attention                              # sequence 8192, 8 heads of 64
    python -m bench.attention --documents lognormal --seq-length 16384 --alone 1024
    python -m bench.attention --json cpu.jsonl             # every figure
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from bench.harness import (
    add_json,
    add_rounds,
    add_sizes,
    check_same,
    format_targets,
    measured,
    sizes_of,
    target,
    write_json,
)
from bench.processes import ONE_PROCESS, Contestants
from bench.shapes import LENGTHS, MaskedShape
from runtime.errors import UserError
from runtime.machine import describe, usable_cores
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Column, Table

DEFAULT_METHODS = ("ring", "striped", "zigzag", "allgather")
MASKED_METHODS = (
    "zigzag",
    "striped",
    "ring",
    "exchange",
    "allgather/balanced",
)  # of packed documents and windows
SOME_GAIN = 1.05  # ratio of pairs below which a share of the gain says nothing
ONE_RANK = "ring"  # of one rank every method is the same

Target = tuple[str, str, float | None, float | None]
TARGETS: tuple[Target, ...] = (
    ("ring/striped", "ratio", 1.3, None),
    (f"striped/{ONE_PROCESS}", "ratio", None, 1.10),
    (f"zigzag/{ONE_PROCESS}", "ratio", None, 1.10),
)
MASKED_TARGETS: tuple[Target, ...] = (
    ("zigzag/exchange", "gain_reached", 0.9, None),
    ("striped/exchange", "ratio", 1.0, None),
)
"""Two contestants, a field of theirs in ``compare``, and the least and the most that it is to be.
"""
RATE_OF_SHORT, GAIN_OF_WINDOW = 0.6, 3.0
"""At least: short documents' FLOP rate against one document's, and one document's time against a
window's.
"""
CONTESTANTS: dict[str, Column] = {
    "": "{name}",
    "median s": "{median:.3f}",
    "min": "{min:.3f}",
    "max": "{max:.3f}",
    "TFLOP/s": "{tflops:.4f}",
    "of matmul": "{of_matmul:.1%}",
    "pairs, M": lambda row: f"{row['slowest_pairs'] / 1e6:.2f}",
}
RATIOS: dict[str, Column] = {
    "": "{name}",
    "ratio": "{ratio:.3f}",
    "by pairs": "{limit:.3f}",
    "reached": "{gain_reached:.0%}",
}
ALONE: dict[str, Column] = {
    "": "{name}",
    "median s": "{median:.3f}",
    "pairs, M": lambda row: f"{row['pairs'] / 1e6:.2f}",
    "TFLOP/s": "{tflops:.4f}",
}


def slowest_pairs(contestant: str, work: MaskedShape, size: int) -> int:
    """Count the (query, key) pairs of the slowest rank, in the plan, not by the clock.

    The ranks of a ring of 3 or more wait for each other in every round, so the slowest rank of each
    round counts. In a ring of 2 all that a rank waits for is sent at the start, and an exchange
    keeps no step at all.
    """
    plan = work.plan(contestant, size)
    pairs = plan.work().pairs  # [rounds, ranks]
    together = size > 2 and not plan.geometry.method.needed_only
    return int(pairs.max(1).sum() if together else pairs.sum(0).max())


def measure_cpu(
    work: MaskedShape,
    methods: tuple[str, ...],
    ranks: int = 2,
    repeats: int = 9,
    max_seconds: float = 150.0,
) -> dict[str, Any]:
    """Time every contestant in turn, ``repeats`` times or until ``max_seconds`` are over (3 times
    at least).

    Raises UserError: fewer cores than ranks, or a method that does not exist or does not take the
    mask; MeasureError: a process failed, or a method's result differs from the one process's.
    """
    cores = usable_cores()[:ranks]
    if len(cores) < ranks:
        raise UserError(
            f"{ranks} ranks need a core each and this process may use {len(cores)}; use fewer ranks"
        )
    limits = {name: slowest_pairs(name, work, ranks) for name in methods}
    names, load_average = [*methods, ONE_PROCESS], list(os.getloadavg())
    with Contestants(work, methods, cores) as contestants:
        truth = contestants.fingerprint(ONE_PROCESS)
        for name in methods:
            check_same(name, contestants.fingerprint(name), truth, work.dtype)
        ceiling = contestants.matmul_tflops()
        steps = measured(
            {name: partial(contestants.step, name) for name in names}, repeats, max_seconds
        )
    rows = {}
    for name, seconds in steps.items():
        rows[name] = summary(seconds, work, limits.get(name, work.pairs / ranks))
    return {
        "benchmark": f"attention, forward + backward, {work.masked}",
        "machine": {
            **describe("cpu"),
            "cores_used": len(cores),
            "pinned": hasattr(os, "sched_setaffinity"),
        },
        "load_average": load_average,
        "workload": vars(work),
        "ranks": ranks,
        "rounds": len(steps[ONE_PROCESS]),
        "matmul_tflops": ceiling,
        "contestants": rows,
        **compare(rows, ranks, work),
    }


def summary(steps: list[list[float]], work: MaskedShape, pairs: float) -> dict[str, Any]:
    """Summarize one contestant; a step is the seconds of its ranks, ``pairs`` those of its slowest
    rank.
    """
    seconds = [max(step) for step in steps]
    middle = median(seconds)
    return {
        "seconds": seconds,
        "median": middle,
        "min": min(seconds),
        "max": max(seconds),
        "tflops": work.flops(work.pairs) / middle / 1e12,
        "slowest_pairs": pairs,
    }


def compare(rows: dict[str, dict[str, Any]], ranks: int, work: MaskedShape) -> dict[str, Any]:
    """Return the ratios of ring to each method and of each method to one process, and the targets
    among them.

    Under packed documents or a window zigzag and striped stand where ring does.

    ``limit`` is the same ratio of pairs counted in the plans; ``gain_reached`` the share of what
    the limit promises above 1, None where it promises nothing.
    """
    ratios: dict[str, dict[str, Any]] = {}
    references = [
        name for name in (("zigzag", "striped") if work.sparse else ("ring",)) if name in rows
    ]
    methods = [name for name in rows if name != ONE_PROCESS]
    pairs = [(slower, faster) for slower in references for faster in methods if faster != slower]
    for slower, faster in [*pairs, *((name, ONE_PROCESS) for name in methods)]:
        a, b = rows[slower], rows[faster]
        ratio, limit = a["median"] / b["median"], a["slowest_pairs"] / b["slowest_pairs"]
        ratios[f"{slower}/{faster}"] = {
            "ratio": ratio,
            "limit": limit,
            "gain_reached": (ratio - 1) / (limit - 1) if limit > SOME_GAIN else None,
        }
    targets = []
    for name, field, lower, upper in MASKED_TARGETS if work.sparse else TARGETS:
        figure = ratios[name][field] if name in ratios and ranks == 2 else None
        if figure is not None:
            targets.append(
                target(name if field == "ratio" else f"{name} {field}", figure, lower, upper)
            )
    return {"ratios": ratios, "targets": targets}


def alone(work: MaskedShape, window: int, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Time one rank's attention under each mask, in turns; return ``alone``, a row per mask, and
    ``alone_targets``.

    Raises MeasureError: a process failed, or a result differs from torch's own.
    """
    masks = {
        "dense": work,
        "short": replace(work, documents="short"),
        "window": replace(work, window=window),
    }
    cores = usable_cores()[:1]
    with ExitStack() as stack:
        ranks = {
            name: stack.enter_context(Contestants(mask, (ONE_RANK,), cores))
            for name, mask in masks.items()
        }
        for name, rank in ranks.items():
            check_same(name, rank.fingerprint(ONE_RANK), rank.fingerprint(ONE_PROCESS), work.dtype)
        steps = {name: partial(rank.step, ONE_RANK) for name, rank in ranks.items()}
        steps[ONE_PROCESS] = partial(ranks["dense"].step, ONE_PROCESS)
        figures = measured(steps, repeats, max_seconds)
    seconds = {name: [step[0] for step in steps] for name, steps in figures.items()}
    return judge({**masks, ONE_PROCESS: work}, seconds)


def judge(masks: dict[str, MaskedShape], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return a row per mask, and the targets."""
    rows: dict[str, dict[str, Any]] = {}
    for name, mask in masks.items():
        middle = median(seconds[name])
        rows[name] = {
            "seconds": seconds[name],
            "median": middle,
            "pairs": mask.pairs,
            "tflops": mask.flops(mask.pairs) / middle / 1e12,
        }
    rate = rows["short"]["tflops"] / max(rows["dense"]["tflops"], rows[ONE_PROCESS]["tflops"])
    gain = rows["dense"]["median"] / rows["window"]["median"]
    targets = [
        target("short documents' FLOP rate / one document's", rate, RATE_OF_SHORT),
        target("one document's time / a window's", gain, GAIN_OF_WINDOW),
    ]
    return {"alone": rows, "alone_targets": targets}


def table(result: dict[str, Any]) -> str:
    """Format the figures of ``measure_cpu``."""
    work, machine = result["workload"], result["machine"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}: sequence {work['seq_length']}, batch {work['batch']}, "
        f"{work['num_heads']} heads ({work['kv_heads']} of keys) of {work['head_dim']}, {work['dtype']}, "
        f"forward + backward, {MaskedShape(**work).masked}",
        f"{result['ranks']} ranks{' pinned to a core each' if machine['pinned'] else ', not pinned'}; "
        f"one process with {result['ranks']} threads; {result['rounds']} rounds; load average at the start "
        f"{result['load_average'][0]:.2f}",
    ]
    rows = [
        {"name": name, "of_matmul": row["tflops"] / result["matmul_tflops"], **row}
        for name, row in result["contestants"].items()
    ]
    ratios = [{"name": name, **row} for name, row in result["ratios"].items()]
    for part in (
        Table(CONTESTANTS, rows).text(),
        Table(RATIOS, ratios).text(),
        format_targets(result["targets"]),
    ):
        lines += ["", *part]
    return "\n".join(lines)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.attention", __doc__)
    add_sizes(parser, seq_length=8192, num_heads=8, kv_heads=None, head_dim=64)
    add_rounds(parser, 9, 150)
    parser.add_argument(
        "--context-parallel-size", type=positive, default=2, help="ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--documents", choices=tuple(LENGTHS), help="packed documents of such lengths"
    )
    parser.add_argument(
        "--window", type=int, metavar="N", help="keys that a query sees, its own among them"
    )
    defaults = f"{' '.join(DEFAULT_METHODS)}; with documents or a window {' '.join(MASKED_METHODS)}"
    parser.add_argument(
        "--methods", nargs="+", help=f"METHOD or METHOD/LAYOUT (default: {defaults})"
    )
    parser.add_argument(
        "--alone", type=int, metavar="N", help="also what documents and a window of N cost one rank"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    whole = MaskedShape(**sizes_of(args))
    if args.alone is not None and not 2 <= args.alone < args.seq_length:
        raise UserError(
            f"--alone is {args.alone}; it must be 2 or more and below --seq-length {args.seq_length}"
        )
    work = replace(whole, documents=args.documents, window=args.window)
    methods = dict.fromkeys(args.methods or (MASKED_METHODS if work.sparse else DEFAULT_METHODS))
    result = measure_cpu(
        work, tuple(methods), args.context_parallel_size, args.repeats, args.max_seconds
    )
    print(table(result), flush=True)
    if args.alone is not None:
        result |= alone(whole, args.alone, args.repeats, args.max_seconds)
        rows = [{"name": name, **row} for name, row in result["alone"].items()]
        targets = format_targets(result["alone_targets"])
        print("\n".join(["", "one rank on one core:", *Table(ALONE, rows).text(), "", *targets]))
    write_json(args, result)


if __name__ == "__main__":
    run_command(main)
