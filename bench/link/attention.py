"""Measure the attention alone, forward and backward, between two emulated nodes with a slow link.

8 ranks in two network namespaces, as in ``python -m bench.link``, and no model: packed documents of
log-normal lengths, documents of about 500 tokens, one document under a window, and one document,
also with a KV head for four query heads; float32. The method exchange, each row once per node,
against every other method twice: sending only the rows that a query sees, and sending all rows, as
every method did before masks decided what travels. Where the best of these spends less than 70 % of
its time on the link, it is not the link that is measured: give a lower --rate.

    python -m bench.link.attention                                     # 16384 tokens, 8 heads of
    32, 100 Mbit/s python -m bench.link.attention --cases short --methods ring zigzag --rate 50mbit
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
"""Masks, as fields of a MaskedShape, and query heads per KV head."""
ASKED = {"lognormal": 2.3, "short": 8.0, "window": 6.0, "one": 1.05, "one_grouped": 1.05}
"""Times as fast as the best other method that sends all rows, at least."""
METHODS = ("ring", "striped", "zigzag", "double_ring", "ulysses", "allgather", "wallfacer_c2")
"""Names of ``bench.link``'s configurations."""
OURS = "exchange"


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

    def plan(self, work: MaskedShape, network: Network) -> Plan:
        """Return the plan on the ranks of a network. Raises ContextError: as ``make_plan``."""
        plan = work.plan(
            self.method, network.size, ranks_per_node=network.ranks_per_node, team_size=self.team
        )
        return AllRows(plan.geometry, plan.mask) if self.all_rows else plan


def attend(
    pipe: Connection, work: MaskedShape, name: str, plan: Plan, truth: list[float], steps: int
) -> None:
    """Join, and run so many forwards and backwards, as ``ranks.run_steps``."""
    with process_group() as group:
        cp = ContextParallel(plan, group)
        step = forward_backward(cp.attend, *(cp.shard(x, dim=1) for x in work.tensors()))
        valid = (cp.positions < work.seq_length).nonzero()[:, 0]
        ranks.run_steps(pipe, group, steps, lambda: [x[:, valid] for x in step()], name, truth)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.link.attention", __doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    add("--link", choices=LINKS, default="shared", help="default: %(default)s")
    add_sizes(parser, seq_length=16384, num_heads=8, head_dim=32)
    ranks.add_link(parser, repeats=3)
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases of a command line, with a line for each contestant.

    Raises MeasureError: a rank failed, or computes something else than one process; NetworkError:
    the machine does not allow the namespaces.
    """
    rows, verdicts = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    shape = {"seq_length": args.seq_length, "num_heads": args.num_heads, "head_dim": args.head_dim}
    with Network(rails=args.link == "rails") as network:
        for case in args.cases:
            work = work_of(case, **shape)
            truth = fingerprint(forward_backward(work.attend, *work.tensors())()).tolist()
            for contestant in contestants(work, args.methods):
                name, plan = contestant.name, contestant.plan(work, network)

                def run(
                    before: Callable[[int], None],
                    steps: int,
                    given: tuple[Any, ...] = (work, name, plan, truth),
                ) -> list[ranks.Iteration]:
                    return ranks.iterate(network, before, attend, *given, steps)

                row = {
                    "case": case,
                    "name": name,
                    "all_rows": contestant.all_rows,
                    **ranks.figures(network, args, run),
                }
                rows.append(row | {"attention_by_plan": crossing(contestant, work, network)})
                print(f"{case} {Table(COLUMNS).line(rows[-1])}", flush=True)
            about = {"mask": work.masked, "kv_heads": work.kv_heads}
            verdicts[case] = about | verdict(case, [row for row in rows if row["case"] == case])
    return {"link": args.link, "workload": shape, "attentions": rows, "verdicts": verdicts}


def crossing(contestant: Contestant, work: MaskedShape, network: Network) -> int:
    """Return the bytes that cross in the busier direction, by the plan."""
    sizes = {
        "batch": 1,
        "heads": work.num_heads,
        "kv_heads": work.kv_heads,
        "head_dim": work.head_dim,
    }
    return max(plan_crossing(contestant.plan(work, network), network.ranks_per_node, **sizes))


def work_of(case: str, **shape: int) -> MaskedShape:
    """Return a case's attention; ``shape`` as the command line has it."""
    fields: dict[str, Any] = {**shape, **CASES[case]}
    return MaskedShape(kv_heads=shape["num_heads"] // fields.pop("grouped", 1), **fields)


def contestants(work: MaskedShape, methods: list[str]) -> list[Contestant]:
    """Return ours and the others, in both forms if they differ: not of one document, nor where
    heads travel.
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
    """Compare ours with the best other method that sends all rows, and with the best of all others."""
    ours = next(row["median"] for row in rows if row["name"] == OURS)
    whole = min((row for row in rows if row["all_rows"]), key=lambda row: row["median"])
    best = min((row for row in rows if row["name"] != OURS), key=lambda row: row["median"])
    name = f"exchange, times as fast as {whole['name']}, the best that sends all rows"
    return {
        **target(name, whole["median"] / ours, ASKED[case]),
        "best": best["name"],
        "against_best": best["median"] / ours,
    }


def markdown(result: dict[str, Any]) -> list[str]:
    """Format a table per case, fastest first, and what was asked."""
    work = result["workload"]
    lines = [
        f"{work['seq_length']} tokens, {work['num_heads']} heads of {work['head_dim']}, {SHARED[result['link']]}."
    ]
    for case, verdict_of in result["verdicts"].items():
        rows = sorted(
            (row for row in result["attentions"] if row["case"] == case),
            key=lambda row: row["median"],
        )
        lines += [
            "",
            f"**{case}**: {verdict_of['mask']}, {verdict_of['kv_heads']} KV heads",
            "",
            *Table(COLUMNS, rows).markdown(),
        ]
        lines += [
            "",
            f"{format_targets([verdict_of])[0]}; "
            f"as {verdict_of['best']}, the best of all others: {verdict_of['against_best']:.2f}",
        ]
    return lines


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    title = "The attention alone over a slow link"
    ranks.run_bench(build_parser().parse_args(argv), "link-attention", title, measure, markdown)


if __name__ == "__main__":
    run_command(main)
