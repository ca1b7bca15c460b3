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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.harness import add_sizes, fingerprint, forward_backward, heading
from bench.link import ranks
from bench.link.__main__ import SHARED
from bench.link.cases import CASES as CONFIGURATIONS
from bench.link.network import LINKS, Network
from bench.link.ranks import plan_crossing, result_head, text_of
from bench.shapes import AttentionShape
from parallel.context import ContextParallel, Plan
from runtime.processes import process_group
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.cases import case_of
from tools.common.report import Column, Table

CASES: dict[str, dict[str, Any]] = {
    "lognormal": {"documents": "lognormal"},
    "short": {"documents": "short"},
    "window": {"window": 1024},
    "one": {},
    "one_grouped": {"grouped": 4},
}
"""Masks, as fields of a AttentionShape, and query heads per KV head."""
ASKED = {"lognormal": 2.3, "short": 8.0, "window": 6.0, "one": 1.05, "one_grouped": 1.05}
"""Times as fast as the best other method that sends all rows, at least."""
METHODS = ("ring", "striped", "zigzag", "double_ring", "ulysses", "allgather", "wallfacer_c2")
"""Names of ``bench.link``'s configurations."""
OURS = "exchange"
SHARE_ON_LINK = 0.7
"""The link's share of the best time of methods that send all rows: with less, it is not the link that is measured."""
COLUMNS: dict[str, Column] = {
    "method": "{name}",
    **ranks.COLUMNS,
    "by the plan, MiB": lambda row: f"{row['attention_by_plan'] / 2**20:.2f}",
}


class AllRows(Plan):
    """A plan by which every row of keys and values travels, whether a query sees it or not."""

    @property
    def sparse(self) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True)
class Contestant:
    """A method with the size of its teams; ``all_rows`` as ``AllRows``."""

    name: str
    method: str
    all_rows: bool = False
    team: int = 1

    def plan(self, work: AttentionShape, network: Network) -> Plan:
        """Return the plan on the ranks of a network. Raises ContextError: as ``make_plan``."""
        plan = work.plan(self.method, network.size, ranks_per_node=network.ranks_per_node, team_size=self.team)
        return AllRows(plan.geometry, plan.mask) if self.all_rows else plan


def attend(pipe: Connection, work: AttentionShape, name: str, plan: Plan, truth: list[float], steps: int) -> None:
    """Join, and run so many forwards and backwards, as ``ranks.run_steps``."""
    with process_group() as group:
        cp = ContextParallel(plan, group)
        step = forward_backward(cp.attend, *(cp.shard(x, dim=1) for x in work.tensors()))
        valid = (cp.positions < work.seq_length).nonzero()[:, 0]
        ranks.run_steps(pipe, group, steps, lambda: [x[:, valid] for x in step()], name, truth, work.dtype)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.link.attention", __doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    add("--link", choices=LINKS, default="shared", help="default: %(default)s")
    add_sizes(parser, seq_length=16384, num_heads=8, head_dim=32)
    ranks.add_link(parser)
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases of a command line, with a line for each contestant.

    Raises MeasureError: a rank failed, or computes something else than one process; NetworkError: the machine does not
    allow the namespaces.
    """
    rows, about = (
        list[dict[str, Any]](),
        result_head(args, "attention alone between two emulated nodes, forward + backward"),
    )
    shape = {"seq_length": args.seq_length, "num_heads": args.num_heads, "head_dim": args.head_dim}
    works = {case: work_of(case, **shape) for case in args.cases}
    with Network(rails=args.link == "rails") as network:
        for case, work in works.items():
            truth = fingerprint(forward_backward(work.attend, *work.tensors())()).tolist()
            for contestant in contestants(work, args.methods):
                row = {"case": case, "name": contestant.name, "all_rows": contestant.all_rows}
                plan = contestant.plan(work, network)
                row |= ranks.figures(network, args, attend, work, contestant.name, plan, truth)
                sizes = {"batch": 1, "heads": work.num_heads, "kv_heads": work.kv_heads, "head_dim": work.head_dim}
                row["attention_by_plan"] = max(plan_crossing(plan, network.ranks_per_node, **sizes, element_size=4))
                rows.append(row)
                print(f"{case} {Table(COLUMNS).line(rows[-1])}", flush=True)
    return {
        **about,
        "load_average": list(os.getloadavg()),
        "link": args.link,
        "ranks_per_node": network.ranks_per_node,
        "workload": shape,
        "masks": {case: {"said": work.masked, "kv_heads": work.kv_heads} for case, work in works.items()},
        "attentions": rows,
        "verdicts": {case: verdict(case, [row for row in rows if row["case"] == case]) for case in args.cases},
    }


def work_of(case: str, **shape: int) -> AttentionShape:
    """Return a case's attention; ``shape`` as the command line has it."""
    fields: dict[str, Any] = {**shape, **CASES[case]}
    return AttentionShape(kv_heads=shape["num_heads"] // fields.pop("grouped", 1), **fields)


def contestants(work: AttentionShape, methods: list[str]) -> list[Contestant]:
    """Return ours and the others, in both forms where they differ: not of one document, nor where heads travel."""
    found = [Contestant(OURS, OURS)]
    for name in methods:
        case = case_of(CONFIGURATIONS[name])
        both = work.sparse and name != "ulysses"
        found.append(Contestant(name + " all rows" * both, case.method, True, case.team))
        found += [Contestant(name, case.method, False, case.team)] * both
    return found


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


def markdown(result: dict[str, Any]) -> str:
    """Format the machine, what was asked, and a table per case, fastest first."""
    lines = [*heading(result), text_of("attention", result, shared=SHARED[result["link"]])]
    for case, said in result["verdicts"].items():
        rows = sorted((row for row in result["attentions"] if row["case"] == case), key=lambda row: row["median"])
        mask, table = result["masks"][case], Table(COLUMNS, rows).markdown()
        lines += ["", f"**{case}**: {mask['said']}, {mask['kv_heads']} KV heads", "", *table, "", sentence(said)]
    return "\n".join(lines) + "\n"


def sentence(said: dict[str, Any]) -> str:
    """Say what ``verdict`` found."""
    bound = "" if said["link_bound"] else ", too little: give a lower --rate"
    return (
        f"exchange is {said['times_as_fast']:.2f} times as fast as {said['best_of_all_rows']}, the best of the methods "
        f"that send all rows (asked: {said['asked']}, {'met' if said['met'] else 'missed'}), which spends "
        f"{said['on_link']:.0%} of its time on the link{bound}; {said['times_as_fast_as_best']:.2f} times as fast as "
        f"{said['best']}, the best of all others."
    )


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    title = "The attention alone over a slow link"
    ranks.run_bench(build_parser().parse_args(argv), "link-attention", title, measure, markdown)


if __name__ == "__main__":
    run_command(main)
