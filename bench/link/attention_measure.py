"""Measure the attention alone in every case: steps without and with the limit, and the bytes that crossed."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from bench.link.attention_cases import ASKED, CASES, METHODS, OURS, SHARE_ON_LINK
from bench.link.attention_ranks import Contestant, attend
from bench.link.measure import WARM_UP_LIMITED, medians, plan_crossing
from bench.link.network import Network
from bench.link.ranks import iterate
from bench.processes import Step
from bench.workload import Workload, fingerprint
from testing.machine import describe

WARM_UP, FREE = 1, 1  # steps without the limit: connections are made; counted


def measure(args: argparse.Namespace, rate: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases of a command line at ``rate`` bits per second; ``tell`` gets a line per contestant.

    Raises:
        MeasureError: a rank failed, or computes something else than one process.
        NetworkError: the machine does not allow the namespaces.
    """
    rows: list[dict[str, Any]] = []
    shape = {"seq_length": args.seq_length, "num_heads": args.num_heads, "head_dim": args.head_dim}
    works = {case: work_of(case, **shape) for case in args.cases}
    machine = describe("cpu")
    with Network(rails=args.link == "rails") as network:
        for case, work in works.items():
            truth = fingerprint(Step(work.attend, *work.tensors())()).tolist()
            for contestant in contestants(work, args.methods):
                row = _one(network, work, contestant, truth, args, rate)
                rows.append({"case": case, "name": contestant.name, "all_rows": contestant.all_rows, **row})
                tell(_line(rows[-1]))
    return {
        "benchmark": "attention alone between two emulated nodes, forward + backward",
        "machine": machine,
        "note": args.note,
        "load_average": list(os.getloadavg()),
        "link": args.link,
        "rate": args.rate,
        "ranks_per_node": network.ranks_per_node,
        "repeats": args.repeats,
        "workload": shape,
        "masks": {case: {"said": work.masked, "kv_heads": work.kv_heads} for case, work in works.items()},
        "attentions": rows,
        "verdicts": {case: verdict(case, [row for row in rows if row["case"] == case]) for case in args.cases},
    }


def work_of(case: str, **shape: int) -> Workload:
    """Return a case's attention; ``shape`` as the command line has it."""
    fields: dict[str, Any] = {**shape, **CASES[case]}
    return Workload(kv_heads=shape["num_heads"] // fields.pop("grouped", 1), **fields)


def contestants(work: Workload, methods: list[str]) -> list[Contestant]:
    """Return ours and the others, in both forms where they differ: not of one document, nor where heads travel."""
    found, masked = [Contestant(OURS, OURS)], work.documents is not None or work.window is not None
    for name in methods:
        method, options = METHODS[name]
        both = masked and method != "ulysses"
        found.append(Contestant(name + " all rows" * both, method, True, options))
        if both:
            found.append(Contestant(name, method, False, options))
    return found


def _one(
    network: Network, work: Workload, contestant: Contestant, truth: list[float], args: argparse.Namespace, rate: float
) -> dict[str, Any]:
    """Run one contestant; return the medians of its steps, and what of them the link takes."""
    plan = contestant.plan(work, network)
    steps = WARM_UP + FREE + WARM_UP_LIMITED + args.repeats
    given = work, contestant.name, plan, truth, steps
    found = medians(network, args.rate, lambda before: iterate(network, before, attend, *given), WARM_UP, FREE)
    sizes = {"batch": 1, "heads": work.num_heads, "kv_heads": work.kv_heads, "head_dim": work.head_dim}
    by_plan = max(plan_crossing(plan, network.ranks_per_node, **sizes, element_size=4))
    rails = network.ranks_per_node if network.rails else 1
    return {**found, "attention_by_plan": by_plan, "on_link": found["crossed"] * 8 / rate / rails / found["median"]}


def verdict(case: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare ours with the best other method that sends all rows, and with the best that sends what is needed."""
    times = {row["name"]: row["median"] for row in rows}
    whole = min((row["name"] for row in rows if row["all_rows"]), key=lambda name: times[name])
    others = [name for name in times if name != OURS]
    best = min(others, key=lambda name: times[name])
    share = next(row["on_link"] for row in rows if row["name"] == whole)
    return {
        "best_of_all_rows": whole,
        "times_as_fast": times[whole] / times[OURS],
        "asked": ASKED[case],
        "met": times[whole] / times[OURS] >= ASKED[case],
        "on_link": share,
        "link_bound": share >= SHARE_ON_LINK,
        "best": best,
        "times_as_fast_as_best": times[best] / times[OURS],
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:12}{row['name']:24}{row['median']:8.3f} s ({row['on_link']:.0%} on the link), "
        f"{row['crossed'] / 2**20:7.2f} MiB crossed ({row['attention_by_plan'] / 2**20:.2f} by plan), "
        f"{row['unlimited']:7.3f} s without a limit"
    )
