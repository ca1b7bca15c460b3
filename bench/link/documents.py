"""Measure documents of mixed lengths between two emulated nodes: one group, or groups by length.

Two nodes of 2 ranks are joined by a slow link, as in ``python -m bench.link``. A step is one
attention, forward and backward, over packed documents, without a model and in float32. One group
of all ranks computes it by ``exchange`` in the layout ``balanced``. Groups by length take turns by
the schedule of ``bench.documents``; a zigzag ring splits each document. And a zigzag ring of all
ranks sends all rows, as groups of a fixed size do.

The lengths are those of chats in ``bench.documents``, cut at ``--longest`` times a rank's tokens.

    python -m bench.link.documents                      # 16,384 tokens, 100 Mbit/s
    python -m bench.link.documents --longest 2 --rate 400mbit
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.documents.groups import Turn, longest_first
from bench.documents.lengths import load_kinds
from bench.harness import add_sizes, fingerprint, forward_backward
from bench.link import ranks
from bench.link.attention import AllRows
from bench.link.network import Network
from bench.link.ranks import COLUMNS, SHARED, plan_crossing
from bench.shapes import MaskedShape
from parallel.context import ContextParallel, Plan, make_plan
from runtime.processes import process_group
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Table

RANKS_PER_NODE = 2
SEED = 0
LONGEST = (1, 2, 4)
"""Lengths of the longest document, in multiples of a rank's tokens: its group has as many ranks."""
ONE_GROUP = "one group"
GROUPS = "groups"
ALL_ROWS = "one ring, all rows"


@dataclass(frozen=True, kw_only=True)
class DrawnShape(MaskedShape):
    """Shape of an attention over documents of given lengths."""

    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Cumulative lengths of the documents, from 0 to ``seq_length``."""
        return (0, *np.cumsum(self.lengths).tolist())


def shape_of(longest: int, num_ranks: int, **sizes: Any) -> DrawnShape:
    """Return the shape with documents of chats, cut at ``longest`` times a rank's tokens.

    ``sizes`` are ``seq_length``, ``num_heads`` and ``head_dim``.
    """
    limit = longest * sizes["seq_length"] // num_ranks
    kind = replace(load_kinds()["chats"], max_length=limit)
    lengths = kind.documents(np.random.default_rng(SEED), sizes["seq_length"] - limit)
    # The longest document is always there, so that its group is.
    return DrawnShape(
        kv_heads=sizes["num_heads"],
        documents="chat",
        lengths=(limit, *lengths.tolist()),
        **sizes,
    )


@dataclass(frozen=True)
class Assigned:
    """A turn and the documents of the step that it computes."""

    turn: Turn
    spans: tuple[tuple[int, int], ...]
    """First token and end of each document."""


def assigned(work: DrawnShape, num_ranks: int) -> list[Assigned]:
    """Schedule the documents in groups; the seconds of a document are its pairs on a rank."""

    def pairs(turn: Turn) -> float:
        return sum(length**2 for length in turn.lengths) / turn.size

    capacity = work.seq_length // num_ranks
    (turns,) = longest_first(work.lengths, num_ranks, capacity, pairs)
    spans: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(work.cu_seqlens):
        spans.setdefault(end - start, []).append((start, end))
    return [Assigned(turn, tuple(spans[length].pop() for length in turn.lengths)) for turn in turns]


def plan_of(turn: Turn) -> Plan:
    """Return the plan of a turn on its ranks: a zigzag ring, or documents of a single rank."""
    documents = (0, *np.cumsum(turn.lengths).tolist())
    return make_plan("zigzag", seq_len=documents[-1], size=turn.size, documents=documents)


def one_group_plan(work: DrawnShape, network: Network) -> Plan:
    """Return the plan of all ranks, by ``exchange`` in the layout ``balanced``."""
    return work.plan("exchange", network.size, ranks_per_node=network.ranks_per_node)


def all_rows_plan(work: DrawnShape, network: Network) -> Plan:
    """Return the plan of a ring of all ranks that sends every row."""
    plan = work.plan("zigzag", network.size)
    return AllRows(plan.geometry, plan.mask)


def attend(
    pipe: Connection, work: DrawnShape, name: str, plan: Plan, truth: list[float], steps: int
) -> None:
    """Join the group of all ranks, and run forward and backward passes by ``ranks.run_steps``."""
    with process_group() as group:
        cp = ContextParallel(plan, group)
        step = forward_backward(cp.attend, *(cp.shard(x, dim=1) for x in work.tensors()))
        valid = (cp.positions < work.seq_length).nonzero()[:, 0]
        ranks.run_steps(pipe, group, steps, lambda: [x[:, valid] for x in step()], name, truth)


def take_turns(
    pipe: Connection, work: DrawnShape, turns: Sequence[Assigned], truth: list[float], steps: int
) -> None:
    """Join, make every group, and run this rank's turns one after the other in each step."""
    with process_group() as group:
        rank = dist.get_rank(group)
        groups = {}
        for part in turns:
            members = part.turn.ranks
            if len(members) > 1 and members not in groups:
                groups[members] = dist.new_group(list(members))
        local_turns = []
        for part in turns:
            if rank in part.turn.ranks:
                local_turns.append(_turn_step(work, part, groups.get(part.turn.ranks)))

        # A rank without a turn has no tokens, but takes part in the sum of fingerprints.
        q, k, v, _ = work.tensors()
        no_tokens = [q[:, :0], q[:, :0], k[:, :0], v[:, :0]]

        def step() -> list[Tensor]:
            results = [no_tokens]
            for run in local_turns:
                results.append(run())
            return [torch.cat(tensors, 1) for tensors in zip(*results, strict=True)]

        ranks.run_steps(pipe, group, steps, step, GROUPS, truth)


def _turn_step(
    work: DrawnShape, part: Assigned, group: dist.ProcessGroup | None
) -> Callable[[], list[Tensor]]:
    """Return a function that computes a turn on this rank: out and gradients of its tokens."""
    plan = plan_of(part.turn)
    cp = ContextParallel(plan, group)
    shards = []
    for tensor in work.tensors():
        tokens = torch.cat([tensor[:, start:end] for start, end in part.spans], 1)
        shards.append(cp.shard(tokens, dim=1))
    step = forward_backward(cp.attend, *shards)
    valid = (cp.positions < plan.seq_len).nonzero()[:, 0]
    return lambda: [x[:, valid] for x in step()]


def crossing(plan: Plan, work: DrawnShape, first: int, ranks_per_node: int) -> np.ndarray:
    """Return the bytes that a plan on the ranks from ``first`` on sends to node 1 and node 0."""
    if first // ranks_per_node == (first + plan.size - 1) // ranks_per_node:
        return np.zeros(2)
    sizes = {"heads": work.num_heads, "kv_heads": work.kv_heads, "head_dim": work.head_dim}
    return np.array(plan_crossing(plan, ranks_per_node, batch=1, **sizes))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases of a command line, and print a line for each way.

    Raises MeasureError if a rank failed, or computes something else than one process, and
    NetworkError if the machine does not allow the namespaces.
    """
    rows: list[dict[str, Any]] = []
    sizes = {"seq_length": args.seq_length, "num_heads": args.num_heads, "head_dim": args.head_dim}
    with Network(rails=False, ranks_per_node=RANKS_PER_NODE) as network:
        for longest in args.longest:
            work = shape_of(longest, network.size, **sizes)
            truth = fingerprint(forward_backward(work.attend, *work.tensors())()).tolist()
            turns = assigned(work, network.size)
            bodies: dict[str, tuple[Any, ...]] = {}
            sent = {}
            for name, make in ((ONE_GROUP, one_group_plan), (ALL_ROWS, all_rows_plan)):
                plan = make(work, network)
                bodies[name] = (attend, work, name, plan, truth)
                sent[name] = crossing(plan, work, 0, RANKS_PER_NODE)
            bodies[GROUPS] = (take_turns, work, turns, truth)
            sent[GROUPS] = sum(
                (crossing(plan_of(t.turn), work, t.turn.first, RANKS_PER_NODE) for t in turns),
                np.zeros(2),
            )
            for name, (body, *arguments) in bodies.items():

                def run(
                    before: Callable[[int], None],
                    steps: int,
                    body: Callable[..., None] = body,
                    arguments: Sequence[Any] = arguments,
                ) -> list[ranks.Iteration]:
                    return ranks.iterate(network, before, body, *arguments, steps)

                row = {
                    "longest": longest,
                    "documents": len(work.lengths),
                    "name": name,
                    **ranks.figures(network, args, run),
                    "attention_by_plan": int(sent[name].max()),
                }
                rows.append(row)
                print(f"{longest} {Table(COLUMNS).line(row)}", flush=True)
    return {"link": "shared", "workload": sizes, "ways": rows}


def markdown(result: dict[str, Any]) -> list[str]:
    """Format a table for each length of the longest document, fastest first."""
    work = result["workload"]
    lines = [
        f"{work['seq_length']} tokens on 4 ranks, {work['num_heads']} heads of {work['head_dim']},"
        f" {SHARED[result['link']]}."
    ]
    for longest in dict.fromkeys(row["longest"] for row in result["ways"]):
        rows = [row for row in result["ways"] if row["longest"] == longest]
        rows.sort(key=lambda row: row["median"])
        title = f"**{rows[0]['documents']} documents, the longest of {longest} ranks' tokens**"
        lines += ["", title, "", *Table(COLUMNS, rows).markdown()]
    return lines


def build_parser() -> argparse.ArgumentParser:
    """Define the command line of ``python -m bench.link.documents``."""
    parser = parser_for("python -m bench.link.documents", __doc__)
    longest = "longest document, in multiples of a rank's tokens (default: 1 2 4)"
    parser.add_argument(
        "--longest", type=positive, nargs="+", choices=LONGEST, default=list(LONGEST), help=longest
    )
    add_sizes(parser, seq_length=16384, num_heads=8, head_dim=32)
    ranks.add_link(parser, repeats=3)
    return parser


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Time the ways over the emulated link, and print and write a report."""
    title = "Documents of mixed lengths over a slow link"
    ranks.run_bench(build_parser().parse_args(argv), "link-documents", title, measure, markdown)


if __name__ == "__main__":
    run_command(main)
