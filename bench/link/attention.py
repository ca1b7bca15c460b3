"""Measure the attention alone, forward and backward, between two emulated nodes with a slow link.

8 ranks in two network namespaces, as in ``python -m bench.link``, and no model: packed documents of log-normal lengths,
documents of about 500 tokens, one document under a window, and one document, also with a KV head for four query heads.
The method exchange, each row once per node, against every other method twice: sending only the rows that a query sees,
and sending all rows, as every method did before masks decided what travels.

    python -m bench.link.attention                                     # 16384 tokens, 8 heads of 32, 100 Mbit/s
    python -m bench.link.attention --cases short --methods ring zigzag --rate 50mbit
"""

import argparse
import os
import re
from typing import Any

from bench.link.attention_ranks import Contestant, attend
from bench.link.attention_report import markdown, write
from bench.link.measure import WARM_UP_LIMITED, medians, plan_crossing
from bench.link.network import LINKS, Network, prepare_machine
from bench.link.ranks import iterate
from bench.link.report import add_results
from bench.processes import Step
from bench.rounds import add_sizes
from bench.workload import Workload, fingerprint
from runtime.errors import UserError
from runtime.machine import describe
from tools.arguments import one_line_errors, parser_for, positive, run_command

WARM_UP, FREE = 1, 1  # steps without the limit: connections are made; counted
CASES: dict[str, dict[str, Any]] = {
    "lognormal": {"documents": "lognormal"},
    "short": {"documents": "short"},
    "window": {"window": 1024},
    "one": {},
    "one_grouped": {"grouped": 4},
}
"""Masks, as fields of a Workload, and query heads per KV head."""
ASKED = {"lognormal": 2.3, "short": 8.0, "window": 6.0, "one": 1.05, "one_grouped": 1.05}
"""Times as fast as the best other method that sends all rows, at least."""
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ring", "striped", "zigzag", "double_ring", "ulysses", "allgather")},
    "wallfacer_c2": ("wallfacer", {"team_size": 2}),
}
OURS = "exchange"
SHARE_ON_LINK = 0.7
"""Of the time of the best other method that sends all rows: where the link takes less, it is not what is measured."""


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.link.attention", __doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all")
    add("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="default: all")
    add("--link", choices=LINKS, default="shared", help="default: %(default)s")
    add_sizes(parser, seq_length=16384, num_heads=8, head_dim=32)
    add("--rate", default="100mbit", help="of the link or of each rail (default: %(default)s)")
    add("--repeats", type=positive, default=3, help="steps that count (default: %(default)s)")
    add_results(parser)
    return parser


def bits_per_second(rate: str) -> float:
    """Return a rate in bits per second. Raises UserError: it is not a number with kbit, mbit or gbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--rate is {rate!r}; give a number with kbit, mbit or gbit, such as 100mbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def measure(args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Measure all cases of a command line at ``rate`` bits per second, with a line for each contestant.

    Raises MeasureError: a rank failed, or computes something else than one process; NetworkError: the machine does not
    allow the namespaces.
    """
    rows, machine = list[dict[str, Any]](), describe("cpu")
    shape = {"seq_length": args.seq_length, "num_heads": args.num_heads, "head_dim": args.head_dim}
    works = {case: work_of(case, **shape) for case in args.cases}
    with Network(rails=args.link == "rails") as network:
        for case, work in works.items():
            truth = fingerprint(Step(work.attend, *work.tensors())()).tolist()
            for contestant in contestants(work, args.methods):
                row = _one(network, work, contestant, truth, args, rate)
                rows.append({"case": case, "name": contestant.name, "all_rows": contestant.all_rows, **row})
                print(_line(rows[-1]), flush=True)
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
    found, masked = [Contestant(OURS, OURS)], work.sparse
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


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    rate = bits_per_second(args.rate)
    prepare_machine()
    result = measure(args, rate)
    print("\n" + markdown(result))
    if args.results:
        print(f"wrote {write(result, args.results)} and its .jsonl")


if __name__ == "__main__":
    run_command(main)
