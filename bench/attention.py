"""Measure context-parallel attention on the CPU: the methods, one process, and the limits.

In one run: ring, striped, zigzag and allgather on 2 processes pinned to one core each, and torch's
scaled_dot_product_attention in one process with a thread on each of the same cores; forward +
backward, causal. The contestants take turns, so that other load on the machine slows all of them
equally; a step lasts as long as its slowest rank.

With packed documents or a window: zigzag, striped, ring, and exchange and allgather over the
balanced layout. The pairs counted in the plans predict a gain over zigzag, and the output shows the
share of this gain that is reached.

--alone also measures the cost of a mask on one rank and one core: one document, documents of about
500 tokens, and one document under a window, each through the plan and its tiles, next to torch's
attention over one document.

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
)  # for packed documents and windows
MIN_GAIN = 1.05
"""Ratio of counted pairs above which ``gain_reached`` is computed; otherwise it is only noise."""
ONE_RANK = "ring"  # any method would do: with one rank all are the same

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
"""Targets under packed documents or a window. Each names two contestants and a field of ``compare``
about them, with this field's minimum and maximum."""
MIN_SHORT_RATE = 0.6
"""Minimum FLOP rate on short documents, as a fraction of the rate on one document."""
MIN_WINDOW_GAIN = 3.0
"""Minimum speedup of a window over the same document without a window."""
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
    """Count the (query, key) pairs of the slowest rank, according to the plan.

    The ranks of a ring of 3 or more wait for each other in every round, so the slowest rank of each
    round counts. In a ring of 2 everything is sent at the start, and an exchange has no rounds, so
    the slowest rank of the whole step counts.
    """
    plan = work.plan(contestant, size)
    pairs = plan.work().pairs  # [rounds, ranks]
    waits_each_round = size > 2 and not plan.geometry.method.needed_only
    if waits_each_round:
        return int(pairs.max(1).sum())
    return int(pairs.sum(0).max())


def measure_cpu(
    work: MaskedShape,
    methods: tuple[str, ...],
    ranks: int = 2,
    repeats: int = 9,
    max_seconds: float = 150.0,
) -> dict[str, Any]:
    """Time every contestant in turn, ``repeats`` times or until ``max_seconds`` (at least 3 times).

    Raises UserError if there are fewer cores than ranks, or a method does not exist or does not
    support the mask, and MeasureError if a process failed, or a method's result differs from that
    of the one process.
    """
    cores = usable_cores()[:ranks]
    if len(cores) < ranks:
        raise UserError(
            f"{ranks} ranks need a core each, but this process may use only {len(cores)}; "
            "use fewer ranks"
        )
    limits = {name: slowest_pairs(name, work, ranks) for name in methods}
    load_average = list(os.getloadavg())
    with Contestants(work, methods, cores) as contestants:
        truth = contestants.fingerprint(ONE_PROCESS)
        for name in methods:
            check_same(name, contestants.fingerprint(name), truth, work.dtype)
        matmul_tflops = contestants.matmul_tflops()
        steps = {name: partial(contestants.step, name) for name in (*methods, ONE_PROCESS)}
        seconds = measured(steps, repeats, max_seconds)

    rows = {}
    for name, contestant_seconds in seconds.items():
        pairs = limits.get(name, work.pairs / ranks)
        rows[name] = summary(contestant_seconds, work, pairs)
    machine = {
        **describe("cpu"),
        "cores_used": len(cores),
        "pinned": hasattr(os, "sched_setaffinity"),
    }
    return {
        "benchmark": f"attention, forward + backward, {work.masked}",
        "machine": machine,
        "load_average": load_average,
        "workload": vars(work),
        "ranks": ranks,
        "rounds": len(seconds[ONE_PROCESS]),
        "matmul_tflops": matmul_tflops,
        "contestants": rows,
        **compare(rows, ranks, work),
    }


def summary(steps: list[list[float]], work: MaskedShape, pairs: float) -> dict[str, Any]:
    """Summarize the times of one contestant.

    Args:
        steps: the seconds of each rank, for each step.
        pairs: (query, key) pairs of the slowest rank.
    """
    seconds = [max(step) for step in steps]
    median_seconds = median(seconds)
    return {
        "seconds": seconds,
        "median": median_seconds,
        "min": min(seconds),
        "max": max(seconds),
        "tflops": work.flops(work.pairs) / median_seconds / 1e12,
        "slowest_pairs": pairs,
    }


def compare(rows: dict[str, dict[str, Any]], ranks: int, work: MaskedShape) -> dict[str, Any]:
    """Return the ratios of median times, and the targets among them.

    The ratios are those of ring to each method, and of each method to one process. Under packed
    documents or a window, zigzag and striped replace ring.

    ``limit`` is the same ratio of pairs counted in the plans; ``gain_reached`` is the share of the
    limit's gain (above 1) that the times reach, or None if the limit has no gain.
    """
    references = ("zigzag", "striped") if work.sparse else ("ring",)
    methods = [name for name in rows if name != ONE_PROCESS]
    pairs = []
    for slower in references:
        if slower in rows:
            pairs += [(slower, faster) for faster in methods if faster != slower]
    pairs += [(name, ONE_PROCESS) for name in methods]

    ratios: dict[str, dict[str, Any]] = {}
    for slower, faster in pairs:
        ratio = rows[slower]["median"] / rows[faster]["median"]
        limit = rows[slower]["slowest_pairs"] / rows[faster]["slowest_pairs"]
        gain_reached = None
        if limit > MIN_GAIN:
            gain_reached = (ratio - 1) / (limit - 1)
        ratios[f"{slower}/{faster}"] = {
            "ratio": ratio,
            "limit": limit,
            "gain_reached": gain_reached,
        }

    targets = []
    for name, field, lower, upper in MASKED_TARGETS if work.sparse else TARGETS:
        if name not in ratios or ranks != 2:
            continue
        figure = ratios[name][field]
        if figure is not None:
            title = name if field == "ratio" else f"{name} {field}"
            targets.append(target(title, figure, lower, upper))
    return {"ratios": ratios, "targets": targets}


def alone(work: MaskedShape, window: int, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Time one rank's attention under each mask, in turns.

    Returns a dictionary with the keys ``alone`` (a row per mask) and ``alone_targets``.

    Raises MeasureError if a process failed, or a result differs from torch's own.
    """
    masks = {
        "dense": work,
        "short": replace(work, documents="short"),
        "window": replace(work, window=window),
    }
    cores = usable_cores()[:1]
    with ExitStack() as stack:
        ranks = {}
        for name, mask in masks.items():
            rank = stack.enter_context(Contestants(mask, (ONE_RANK,), cores))
            ranks[name] = rank
        for name, rank in ranks.items():
            check_same(name, rank.fingerprint(ONE_RANK), rank.fingerprint(ONE_PROCESS), work.dtype)
        steps = {name: partial(rank.step, ONE_RANK) for name, rank in ranks.items()}
        steps[ONE_PROCESS] = partial(ranks["dense"].step, ONE_PROCESS)
        figures = measured(steps, repeats, max_seconds)

    seconds = {}
    for name, rank_seconds in figures.items():
        seconds[name] = [step[0] for step in rank_seconds]
    return judge({**masks, ONE_PROCESS: work}, seconds)


def judge(masks: dict[str, MaskedShape], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the rows and targets of ``alone``, from the seconds of each mask's steps."""
    rows: dict[str, dict[str, Any]] = {}
    for name, mask in masks.items():
        median_seconds = median(seconds[name])
        rows[name] = {
            "seconds": seconds[name],
            "median": median_seconds,
            "pairs": mask.pairs,
            "tflops": mask.flops(mask.pairs) / median_seconds / 1e12,
        }
    rate = rows["short"]["tflops"] / max(rows["dense"]["tflops"], rows[ONE_PROCESS]["tflops"])
    gain = rows["dense"]["median"] / rows["window"]["median"]
    targets = [
        target("short documents' FLOP rate / one document's", rate, MIN_SHORT_RATE),
        target("one document's time / a window's", gain, MIN_WINDOW_GAIN),
    ]
    return {"alone": rows, "alone_targets": targets}


def table(result: dict[str, Any]) -> str:
    """Format the figures of ``measure_cpu`` as a table."""
    work = result["workload"]
    machine = result["machine"]
    ranks = result["ranks"]
    pinned = " pinned to a core each" if machine["pinned"] else ", not pinned"
    lines = [
        f"{machine['device']}, torch {machine['torch']}: sequence {work['seq_length']},"
        f" batch {work['batch']}, {work['num_heads']} heads ({work['kv_heads']} of keys)"
        f" of {work['head_dim']}, {work['dtype']}, forward + backward,"
        f" {MaskedShape(**work).masked}",
        f"{ranks} ranks{pinned}; one process with {ranks} threads; {result['rounds']} rounds;"
        f" load average at the start {result['load_average'][0]:.2f}",
    ]
    rows = []
    for name, row in result["contestants"].items():
        rows.append({"name": name, "of_matmul": row["tflops"] / result["matmul_tflops"], **row})
    ratios = [{"name": name, **row} for name, row in result["ratios"].items()]
    lines += ["", *Table(CONTESTANTS, rows).text()]
    lines += ["", *Table(RATIOS, ratios).text()]
    lines += ["", *format_targets(result["targets"])]
    return "\n".join(lines)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Time the methods of attention, and print and write the figures."""
    parser = parser_for("python -m bench.attention", __doc__)
    add_sizes(parser, seq_length=8192, num_heads=8, kv_heads=None, head_dim=64)
    add_rounds(parser, 9, 150)
    parser.add_argument(
        "--context-parallel-size",
        type=positive,
        default=2,
        help="number of ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--documents",
        choices=tuple(LENGTHS),
        help="pack documents with lengths from this distribution",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="number of keys that a query sees, including its own",
    )
    defaults = f"{' '.join(DEFAULT_METHODS)}; with documents or a window {' '.join(MASKED_METHODS)}"
    parser.add_argument(
        "--methods", nargs="+", help=f"METHOD or METHOD/LAYOUT (default: {defaults})"
    )
    parser.add_argument(
        "--alone",
        type=int,
        metavar="N",
        help="also measure the cost of documents and of a window of N keys on one rank",
    )
    add_json(parser)
    args = parser.parse_args(argv)
    whole = MaskedShape(**sizes_of(args))
    if args.alone is not None and not 2 <= args.alone < args.seq_length:
        raise UserError(
            f"--alone is {args.alone}; it must be 2 or more and below --seq-length"
            f" {args.seq_length}"
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
        lines = ["", "one rank on one core:", *Table(ALONE, rows).text(), "", *targets]
        print("\n".join(lines))
    write_json(args, result)


if __name__ == "__main__":
    run_command(main)
