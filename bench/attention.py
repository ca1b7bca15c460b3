"""Measure the attention: the context-parallel methods against each other, against one process, against the limits.

On the CPU, in one run: ring, striped, zigzag and allgather on 2 processes pinned to one core each, and torch's
scaled_dot_product_attention in one process with a thread on each of the same cores; forward + backward, causal. The
contestants take turns, so that whatever else the machine does hits all alike; a step lasts as long as its slowest rank.
With packed documents or a window: zigzag, striped, ring, and exchange and allgather over the layout balanced.

    python -m bench.attention                              # sequence 8192, 8 heads of 64
    python -m bench.attention --documents lognormal --seq-length 16384
    python -m bench.attention --json cpu.jsonl             # every figure
"""

import argparse
import os
import time
from statistics import median, quantiles
from typing import Any

from bench.packing import LENGTHS
from bench.processes import ONE_PROCESS, Contestants, Times
from bench.rounds import add_json, add_rounds, add_sizes, keep, said, sizes_of, target, turns
from bench.workload import DTYPES, Workload, check_same
from runtime.errors import UserError
from runtime.machine import OtherLoad, describe, usable_cores
from tools.arguments import one_line_errors, parser_for, positive, run_command
from tools.report import aligned

DEFAULT_METHODS = ("ring", "striped", "zigzag", "allgather")
MASKED_METHODS = ("zigzag", "striped", "ring", "exchange", "allgather/balanced")  # of packed documents and windows
SETTLE_SECONDS = 0.02  # OpenMP threads spin for a moment after their work ends
SOME_GAIN = 1.05  # ratio of pairs below which a share of the gain says nothing
DISTURBED = 0.05  # share of the cores taken by others, beyond which the clock misleads


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
"""Two contestants, a field of theirs in ``compare``, and the least and the most that it is to be."""


def slowest_pairs(contestant: str, work: Workload, size: int) -> int:
    """Count the (query, key) pairs of the slowest rank, in the plan, not by the clock.

    The ranks of a ring of 3 or more wait for each other in every round, so the slowest rank of each round counts. In a
    ring of 2 all that a rank waits for is sent at the start, and an exchange keeps no step at all.
    """
    plan = work.plan(contestant, size)
    pairs = plan.work().pairs  # [rounds, ranks]
    together = size > 2 and not plan.geometry.method.capabilities().needed_only
    return int(pairs.max(1).sum() if together else pairs.sum(0).max())


def measure_cpu(
    work: Workload, methods: tuple[str, ...], ranks: int = 2, repeats: int = 9, max_seconds: float = 150.0
) -> dict[str, Any]:
    """Time every contestant in turn, ``repeats`` times or until ``max_seconds`` are over (3 times at least).

    Raises UserError: fewer cores than ranks, or a method that does not exist or does not take the mask; MeasureError: a
    process failed, or a method's result differs from the one process's.
    """
    cores = usable_cores()[:ranks]
    if len(cores) < ranks:
        raise UserError(f"{ranks} ranks need a core each and this process may use {len(cores)}; use fewer ranks")
    limits = {name: slowest_pairs(name, work, ranks) for name in methods}
    names = [*methods, ONE_PROCESS]
    steps: dict[str, list[list[Times]]] = {name: [] for name in names}
    with Contestants(work, methods, cores) as contestants:
        truth = contestants.fingerprint(ONE_PROCESS)
        for name in methods:
            check_same(name, contestants.fingerprint(name), truth, work.dtype)
        ceiling = contestants.matmul_tflops()
        own, others = contestants.cpu_seconds(), OtherLoad(cores)
        for name in turns(names, repeats, max_seconds):
            time.sleep(SETTLE_SECONDS)
            steps[name].append(contestants.step(name))
        taken = others.cores_taken(contestants.cpu_seconds() - own)
    found = {name: summary(times, work, limits.get(name), ranks) for name, times in steps.items()}
    return {
        "benchmark": f"attention, forward + backward, {work.masked}",
        "machine": {**describe("cpu"), "cores_used": len(cores), "pinned": hasattr(os, "sched_setaffinity")},
        "load": {"cores_taken_by_others": taken, "load_average": list(os.getloadavg())},
        "workload": vars(work),
        "ranks": ranks,
        "rounds": len(steps[ONE_PROCESS]),
        "matmul_tflops": ceiling,
        "contestants": found,
        **compare(found, ranks, work),
    }


def summary(steps: list[list[Times]], work: Workload, limit: int | None, ranks: int) -> dict[str, Any]:
    """Summarize one contestant; a step is the times of its ranks, ``limit`` its ``slowest_pairs``."""
    seconds = [max(times.wall for times in step) for step in steps]
    threads = ranks if limit is None else 1
    middle = median(seconds)
    return {
        "seconds": seconds,
        "median": middle,
        "min": min(seconds),
        "max": max(seconds),
        "cpu_median": median(max(times.cpu for times in step) / threads for step in steps),
        "tflops": work.flops(work.pairs) / middle / 1e12,
        "slowest_pairs": work.pairs / ranks if limit is None else limit,
    }


def compare(found: dict[str, dict[str, Any]], ranks: int, work: Workload) -> dict[str, Any]:
    """Return the ratios of ring to each method and of each method to one process, and the targets among them.

    Under packed documents or a window zigzag and striped stand where ring does.

    ``limit`` is the same ratio of pairs counted in the plans; ``gain_reached`` the share of what the limit promises
    above 1, None where it promises nothing; ``paired`` the quartiles of the ratio inside each round; ``cpu`` the ratio
    of the busiest rank's CPU time, which other processes on the cores disturb less than the clock.
    """
    ratios: dict[str, dict[str, Any]] = {}
    references = [name for name in (("zigzag", "striped") if work.sparse else ("ring",)) if name in found]
    pairs = [(slower, name) for slower in references for name in found if name not in (slower, ONE_PROCESS)]
    for slower, faster in [*pairs, *((name, ONE_PROCESS) for name in found if name != ONE_PROCESS)]:
        a, b = found[slower], found[faster]
        by_round = [x / y for x, y in zip(a["seconds"], b["seconds"], strict=True)]
        ratio, limit = a["median"] / b["median"], a["slowest_pairs"] / b["slowest_pairs"]
        ratios[f"{slower}/{faster}"] = {
            "ratio": ratio,
            "limit": limit,
            "gain_reached": (ratio - 1) / (limit - 1) if limit > SOME_GAIN else None,
            "paired": quantiles(by_round, n=4, method="inclusive") if len(by_round) > 1 else by_round * 3,
            "cpu": a["cpu_median"] / b["cpu_median"],
        }
    targets = []
    for name, field, least, most in MASKED_TARGETS if work.sparse else TARGETS:
        figure = ratios[name][field] if name in ratios and ranks == 2 else None
        if figure is not None:
            targets.append(target(name if field == "ratio" else f"{name} {field}", figure, least, most))
    return {"ratios": ratios, "targets": targets}


def table(result: dict[str, Any]) -> str:
    """Format the figures of ``measure_cpu`` as a table."""
    work, machine, load = result["workload"], result["machine"], result["load"]
    taken = load["cores_taken_by_others"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}: sequence {work['seq_length']}, batch {work['batch']}, "
        f"{work['num_heads']} heads ({work['kv_heads']} of keys) of {work['head_dim']}, {work['dtype']}, "
        f"forward + backward, {Workload(**work).masked}",
        f"{result['ranks']} ranks{' pinned to a core each' if machine['pinned'] else ', not pinned'}; "
        f"one process with {result['ranks']} threads; {result['rounds']} rounds; other processes took "
        f"{'an unknown share' if taken is None else f'{taken:.2f}'} of {machine['cores_used']} cores",
        "",
    ]
    rows = [["", "median s", "min", "max", "CPU s", "TFLOP/s", "of matmul", "pairs, M"]]
    for name, found in result["contestants"].items():
        seconds = [f"{found[figure]:.3f}" for figure in ("median", "min", "max", "cpu_median")]
        rates = [f"{found['tflops']:.4f}", f"{found['tflops'] / result['matmul_tflops']:.1%}"]
        rows.append([name, *seconds, *rates, f"{found['slowest_pairs'] / 1e6:.2f}"])
    lines += aligned(rows)
    rows = [["", "ratio", "by pairs", "reached", "by CPU time", "quartiles by round"]]
    for name, found in result["ratios"].items():
        reached = "" if found["gain_reached"] is None else f"{found['gain_reached']:.0%}"
        quartiles = ", ".join(f"{value:.2f}" for value in found["paired"])
        rows.append([name, f"{found['ratio']:.3f}", f"{found['limit']:.3f}", reached, f"{found['cpu']:.3f}", quartiles])
    lines += ["", *aligned(rows)]
    lines += ["", *said(result["targets"])]
    if taken is not None and taken > DISTURBED * machine["cores_used"]:
        lines.append("note: others kept these cores busy; judge by CPU time, or measure again on an idle machine")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.attention", __doc__)
    add_sizes(parser, seq_length=8192, num_heads=8, kv_heads=None, head_dim=64, batch=1)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="default: %(default)s")
    add_rounds(parser, 9, 150)
    parser.add_argument("--context-parallel-size", type=positive, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--documents", choices=tuple(LENGTHS), help="packed documents of such lengths")
    parser.add_argument("--window", type=int, metavar="N", help="keys that a query sees, its own among them")
    defaults = f"{' '.join(DEFAULT_METHODS)}; with documents or a window {' '.join(MASKED_METHODS)}"
    parser.add_argument("--methods", nargs="+", help=f"METHOD or METHOD/LAYOUT (default: {defaults})")
    add_json(parser)
    return parser


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    work = Workload(**sizes_of(args), dtype=args.dtype, documents=args.documents, window=args.window)
    methods = dict.fromkeys(args.methods or (MASKED_METHODS if work.sparse else DEFAULT_METHODS))
    result = measure_cpu(work, tuple(methods), args.context_parallel_size, args.repeats, args.max_seconds)
    print(table(result))
    keep(args, result)


if __name__ == "__main__":
    run_command(main)
