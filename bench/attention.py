"""Measure the attention: the context-parallel methods against each other, against one process, against the limits.

On the CPU, in one run: ring, striped, zigzag and allgather on 2 processes pinned to one core each, and torch's
scaled_dot_product_attention in one process with a thread on each of the same cores; forward + backward, causal. The
contestants take turns, so that whatever else the machine does hits all alike; a step lasts as long as its slowest rank.
With packed documents or a window: zigzag, striped, ring, and exchange and allgather over the layout balanced.

    python -m bench.attention                              # sequence 8192, 8 heads of 64
    python -m bench.attention --documents lognormal --seq-length 16384
    python -m bench.attention --assert --json cpu.jsonl    # exit status 1 where a target is missed
    python -m bench.attention --device cuda                # block kernels and the compute of a ring step on one GPU
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from bench.packing import LENGTHS
from bench.processes import ONE_PROCESS, Contestants, Times
from bench.workload import DTYPES, Workload, check_same
from runtime.errors import UserError
from testing.machine import OtherLoad, describe, usable_cores
from testing.records import write_records
from tools.arguments import one_line_errors, parser_for, run_command

DEFAULT_METHODS = ("ring", "striped", "zigzag", "allgather")
MASKED_METHODS = ("zigzag", "striped", "ring", "exchange", "allgather/balanced")  # of packed documents and windows
SETTLE_SECONDS = 0.02  # OpenMP threads spin for a moment after their work ends
MINIMUM_REPEATS = 3
CPU_DEFAULTS: dict[str, Any] = {
    "seq_length": 8192,
    "num_heads": 8,
    "head_dim": 64,
    "dtype": "float32",
    "context_parallel_size": 2,
}
CUDA_DEFAULTS: dict[str, Any] = {
    "seq_length": 8192,
    "num_heads": 16,
    "head_dim": 128,
    "dtype": "bfloat16",
    "context_parallel_size": 8,
}
SOME_GAIN = 1.05  # ratio of pairs below which a share of the gain says nothing
DISTURBED = 0.05  # share of the cores taken by others, beyond which the clock misleads


class Target(NamedTuple):
    """A ratio of two contestants' medians, or another field of theirs in ``compare``, and its bounds."""

    slower: str
    faster: str
    at_least: float | None
    at_most: float | None
    field: str = "ratio"


TARGETS = (
    Target("ring", "striped", 1.3, None),
    Target("striped", ONE_PROCESS, None, 1.10),
    Target("zigzag", ONE_PROCESS, None, 1.10),
)
MASKED_TARGETS = (
    Target("zigzag", "exchange", 0.9, None, "gain_reached"),
    Target("striped", "exchange", 1.0, None),
)


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

    Raises:
        UserError: fewer cores than ranks, or a method that does not exist or does not take the mask.
        MeasureError: a process failed, or a method's result differs from the one process's.
    """
    cores = usable_cores()[:ranks]
    if len(cores) < ranks:
        raise UserError(f"{ranks} ranks need a core each and this process may use {len(cores)}; use fewer ranks")
    limits = {name: slowest_pairs(name, work, ranks) for name in methods}
    names = [*methods, ONE_PROCESS]
    rounds: list[dict[str, list[Times]]] = []
    with Contestants(work, methods, cores) as contestants:
        truth = contestants.fingerprint(ONE_PROCESS)
        for name in methods:
            check_same(name, contestants.fingerprint(name), truth, work.dtype)
        ceiling = contestants.matmul_tflops()
        start, own = time.monotonic(), contestants.cpu_seconds()
        others = OtherLoad(cores)
        while len(rounds) < repeats:
            spent = time.monotonic() - start
            if len(rounds) >= MINIMUM_REPEATS and spent + spent / len(rounds) > max_seconds:
                break
            turn = len(rounds) % len(names)  # so that none always follows the same one
            times: dict[str, list[Times]] = {}
            for name in names[turn:] + names[:turn]:
                time.sleep(SETTLE_SECONDS)
                times[name] = contestants.step(name)
            rounds.append(times)
        taken = others.cores_taken(contestants.cpu_seconds() - own)
    found = {name: summary([times[name] for times in rounds], work, limits.get(name), ranks) for name in names}
    return {
        "benchmark": f"attention, forward + backward, {work.masked}",
        "machine": {**describe("cpu"), "cores_used": len(cores), "pinned": hasattr(os, "sched_setaffinity")},
        "load": {"cores_taken_by_others": taken, "load_average": list(os.getloadavg())},
        "workload": vars(work),
        "ranks": ranks,
        "rounds": len(rounds),
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
    masked = work.documents is not None or work.window is not None
    references = [name for name in (("zigzag", "striped") if masked else ("ring",)) if name in found]
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
    for target in MASKED_TARGETS if masked else TARGETS:
        name = f"{target.slower}/{target.faster}"
        ratio = ratios[name][target.field] if name in ratios and ranks == 2 else None
        if ratio is not None:
            met = (target.at_least or 0) <= ratio <= (target.at_most or float("inf"))
            bound = f">= {target.at_least}" if target.at_least else f"<= {target.at_most}"
            named = name if target.field == "ratio" else f"{name} {target.field}"
            targets.append({"name": named, "ratio": ratio, "bound": bound, "met": met})
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
        f"{'':20}{'median s':>10}{'min':>9}{'max':>9}{'CPU s':>9}{'TFLOP/s':>10}{'of matmul':>11}{'pairs, M':>10}",
    ]
    for name, found in result["contestants"].items():
        share = found["tflops"] / result["matmul_tflops"]
        lines.append(
            f"{name:20}{found['median']:10.3f}{found['min']:9.3f}{found['max']:9.3f}{found['cpu_median']:9.3f}"
            f"{found['tflops']:10.4f}{share:11.1%}{found['slowest_pairs'] / 1e6:10.2f}"
        )
    lines += ["", f"{'':32}{'ratio':>8}{'by pairs':>10}{'reached':>9}{'by CPU time':>13}   {'quartiles by round'}"]
    for name, found in result["ratios"].items():
        quartiles = ", ".join(f"{value:.2f}" for value in found["paired"])
        reached = "" if found["gain_reached"] is None else f"{found['gain_reached']:.0%}"
        ratio = f"{found['ratio']:8.3f}{found['limit']:10.3f}{reached:>9}{found['cpu']:13.3f}"
        lines.append(f"{name:32}{ratio}   {quartiles}")
    targets = (
        f"{t['name']} {t['bound']}: {t['ratio']:.3f}, {'met' if t['met'] else 'MISSED'}" for t in result["targets"]
    )
    lines += ["", *targets]
    if taken is not None and taken > DISTURBED * machine["cores_used"]:
        lines.append(
            "note: other processes kept these cores busy; judge by CPU time, or measure again on an idle machine"
        )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.attention", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--seq-length", type=int, help="default: 8192; on cuda several, 2048 to 32768")
    parser.add_argument("--num-heads", type=int, help="query heads (default: 8; on cuda 16)")
    parser.add_argument("--kv-heads", type=int, help="key and value heads (default: as many as query heads)")
    parser.add_argument("--head-dim", type=int, help="default: 64; on cuda 128")
    parser.add_argument("--batch", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32; on cuda bfloat16")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of all contestants (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, default=150, help="no further round after this long (default: %(default)s)"
    )
    parser.add_argument("--context-parallel-size", type=int, help="ranks (default: 2; on cuda 8, simulated)")
    parser.add_argument("--documents", choices=tuple(LENGTHS), help="packed documents of such lengths (cpu)")
    parser.add_argument("--window", type=int, metavar="N", help="keys that a query sees, its own among them (cpu)")
    defaults = f"{' '.join(DEFAULT_METHODS)}; with documents or a window {' '.join(MASKED_METHODS)}"
    parser.add_argument("--methods", nargs="+", help=f"METHOD or METHOD/LAYOUT (default: {defaults})")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every figure here too, as JSON lines")
    parser.add_argument(
        "--assert", dest="assert_targets", action="store_true", help="exit with status 1 where a target is missed (cpu)"
    )
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for, print it and return it."""
    on_gpu = args.device == "cuda"
    masked = args.documents is not None or args.window is not None
    methods = tuple(dict.fromkeys(args.methods or (MASKED_METHODS if masked else DEFAULT_METHODS)))
    if on_gpu and masked:
        raise UserError("--documents and --window are measured on the CPU alone; leave them out with --device cuda")
    if args.repeats < 1:
        raise UserError(f"--repeats is {args.repeats}; it must be 1 or more")
    chosen = dict(CUDA_DEFAULTS if on_gpu else CPU_DEFAULTS)
    chosen |= {name: value for name, value in vars(args).items() if name in chosen and value is not None}
    ranks = chosen.pop("context_parallel_size")
    heads = chosen["num_heads"] if args.kv_heads is None else args.kv_heads
    work = Workload(**chosen, batch=args.batch, kv_heads=heads, documents=args.documents, window=args.window)
    if ranks < 1:
        raise UserError(f"--context-parallel-size is {ranks}; it must be 1 or more")
    if not on_gpu:
        result = measure_cpu(work, methods, ranks, args.repeats, args.max_seconds)
        print(table(result))
        return result
    from bench import gpu

    lengths = gpu.LENGTHS if args.seq_length is None else (args.seq_length,)
    result = gpu.measure("cuda", work, lengths, methods, ranks, args.repeats)
    print(gpu.table(result))
    return result


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = build_parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 1
    result = run(args)
    if args.json:
        write_records(args.json, result)
    missed = [target for target in result.get("targets", ()) if not target["met"]]
    if args.assert_targets and missed:
        for target in missed:
            print(f"error: {target['name']} is {target['ratio']:.3f}, to be {target['bound']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
