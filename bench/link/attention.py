"""Measure the attention alone, forward and backward, between two emulated nodes with a slow link.

8 ranks run in two network namespaces, as in ``python -m bench.link``, without a model. The cases
are packed documents of log-normal lengths, documents of about 500 tokens, one document under a
window, and one document, also with a KV head for four query heads; all in float32.

The method exchange, which sends each row once per node, runs against two forms of every other
method: one sends only the rows that a query sees, and one sends all rows, as every method did
before masks decided what is sent. If the best of these spends less than 70 % of its time on the
link, the bench measures compute and not the link; give a lower --rate then.

    # 16384 tokens, 8 heads of 32, 100 Mbit/s
    python -m bench.link.attention
    python -m bench.link.attention --cases short --methods ring zigzag --rate 50mbit
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.harness import add_sizes, fingerprint, format_targets, forward_backward, target
from bench.link import ranks
from bench.link.cases import CASES as CONFIGURATIONS
from bench.link.network import LINKS, Network
from bench.link.ranks import COLUMNS, SHARED, plan_crossing
from bench.shapes import MaskedShape
from parallel.context import ContextParallel, Plan
from runtime.processes import process_group
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.cases import case_of
from tools.common.report import Table

CASES: dict[str, dict[str, Any]] = {
    "lognormal": {"documents": "lognormal"},
    "short": {"documents": "short"},
    "window": {"window": 1024},
    "one": {},
    "one_grouped": {"grouped": 4},
}
"""Masks (fields of a MaskedShape), and query heads per KV head, keyed by case."""
MIN_SPEEDUP = {"lognormal": 2.3, "short": 8.0, "window": 6.0, "one": 1.05, "one_grouped": 1.05}
"""Minimum speedup of exchange over the best other method that sends all rows, keyed by case."""
METHODS = ("ring", "striped", "zigzag", "double_ring", "ulysses", "allgather", "wallfacer_c2")
"""Methods to compare exchange with, named as the configurations of ``bench.link``."""
OURS = "exchange"


class AllRows(Plan):
    """A plan that sends every row of keys and values, including rows that no query sees."""

    @property
    def sparse(self) -> bool:
        """Always False, so that all rows are sent."""
        return False


@dataclass(frozen=True)
class Contestant:
    """A method and its team size; with ``all_rows`` its plan is an ``AllRows``."""

    name: str
    method: str
    all_rows: bool = False
    team: int = 1

    def plan(self, work: MaskedShape, network: Network) -> Plan:
        """Return the plan on a network's ranks. Raises ContextError as ``make_plan`` does."""
        plan = work.plan(
            self.method, network.size, ranks_per_node=network.ranks_per_node, team_size=self.team
        )
        if self.all_rows:
            return AllRows(plan.geometry, plan.mask)
        return plan


def attend(
    pipe: Connection, work: MaskedShape, name: str, plan: Plan, truth: list[float], steps: int
) -> None:
    """Join the group, and run forward and backward passes by ``ranks.run_steps``."""
    with process_group() as group:
        cp = ContextParallel(plan, group)
        step = forward_backward(cp.attend, *(cp.shard(x, dim=1) for x in work.tensors()))
        valid = (cp.positions < work.seq_length).nonzero()[:, 0]
        ranks.run_steps(pipe, group, steps, lambda: [x[:, valid] for x in step()], name, truth)


def build_parser() -> argparse.ArgumentParser:
    """Define the command line of ``python -m bench.link.attention``."""
    parser = parser_for("python -m bench.link.attention", __doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    add("--link", choices=LINKS, default="shared", help="default: %(default)s")
    add_sizes(parser, seq_length=16384, num_heads=8, head_dim=32)
    ranks.add_link(parser, repeats=3)
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases of a command line, and print a line for each contestant.

    Raises MeasureError if a rank failed, or computes something else than one process, and
    NetworkError if the machine does not allow the namespaces.
    """
    rows: list[dict[str, Any]] = []
    verdicts: dict[str, dict[str, Any]] = {}
    shape = {"seq_length": args.seq_length, "num_heads": args.num_heads, "head_dim": args.head_dim}
    with Network(rails=args.link == "rails") as network:
        for case in args.cases:
            work = work_of(case, **shape)
            truth = fingerprint(forward_backward(work.attend, *work.tensors())()).tolist()
            for contestant in contestants(work, args.methods):
                plan = contestant.plan(work, network)

                def run(
                    before: Callable[[int], None],
                    steps: int,
                    arguments: tuple[Any, ...] = (work, contestant.name, plan, truth),
                ) -> list[ranks.Iteration]:
                    return ranks.iterate(network, before, attend, *arguments, steps)

                row = {
                    "case": case,
                    "name": contestant.name,
                    "all_rows": contestant.all_rows,
                    **ranks.figures(network, args, run),
                    "attention_by_plan": crossing(contestant, work, network),
                }
                rows.append(row)
                print(f"{case} {Table(COLUMNS).line(row)}", flush=True)
            case_rows = [row for row in rows if row["case"] == case]
            verdicts[case] = {
                "mask": work.masked,
                "kv_heads": work.kv_heads,
                **verdict(case, case_rows),
            }
    return {"link": args.link, "workload": shape, "attentions": rows, "verdicts": verdicts}


def crossing(contestant: Contestant, work: MaskedShape, network: Network) -> int:
    """Return the bytes that cross the link in the busier direction, according to the plan."""
    sizes = {
        "batch": 1,
        "heads": work.num_heads,
        "kv_heads": work.kv_heads,
        "head_dim": work.head_dim,
    }
    return max(plan_crossing(contestant.plan(work, network), network.ranks_per_node, **sizes))


def work_of(case: str, **shape: int) -> MaskedShape:
    """Return the attention shape of a case, with sizes from the command line."""
    fields: dict[str, Any] = {**shape, **CASES[case]}
    heads_per_kv_head = fields.pop("grouped", 1)
    return MaskedShape(kv_heads=shape["num_heads"] // heads_per_kv_head, **fields)


def contestants(work: MaskedShape, methods: list[str]) -> list[Contestant]:
    """Return exchange, and each other method in both forms if these differ.

    The forms (sending all rows, or only needed ones) do not differ for one document without a
    window, nor for ulysses, which sends heads.
    """
    chosen = [Contestant(OURS, OURS)]
    for name in methods:
        case = case_of(CONFIGURATIONS[name])
        if work.sparse and name != "ulysses":
            chosen.append(Contestant(f"{name} all rows", case.method, True, case.team))
            chosen.append(Contestant(name, case.method, False, case.team))
        else:
            chosen.append(Contestant(name, case.method, True, case.team))
    return chosen


def verdict(case: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare exchange with the best other method, and with the best that sends all rows."""
    our_median = next(row["median"] for row in rows if row["name"] == OURS)
    others = [row for row in rows if row["name"] != OURS]
    others.sort(key=lambda row: row["median"])
    best = others[0]
    best_all_rows = next(row for row in others if row["all_rows"])
    name = f"exchange, times as fast as {best_all_rows['name']}, the best that sends all rows"
    return {
        **target(name, best_all_rows["median"] / our_median, MIN_SPEEDUP[case]),
        "best": best["name"],
        "against_best": best["median"] / our_median,
    }


def markdown(result: dict[str, Any]) -> list[str]:
    """Format a table per case, fastest first, and its target."""
    work = result["workload"]
    lines = [
        f"{work['seq_length']} tokens, {work['num_heads']} heads of {work['head_dim']},"
        f" {SHARED[result['link']]}."
    ]
    for case, verdict in result["verdicts"].items():
        rows = [row for row in result["attentions"] if row["case"] == case]
        rows.sort(key=lambda row: row["median"])
        lines += ["", f"**{case}**: {verdict['mask']}, {verdict['kv_heads']} KV heads", ""]
        lines += Table(COLUMNS, rows).markdown()
        lines += [
            "",
            f"{format_targets([verdict])[0]}; as {verdict['best']}, the best of all others:"
            f" {verdict['against_best']:.2f}",
        ]
    return lines


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Time attention over the emulated link, and print and write a report."""
    title = "The attention alone over a slow link"
    ranks.run_bench(build_parser().parse_args(argv), "link-attention", title, measure, markdown)


if __name__ == "__main__":
    run_command(main)
