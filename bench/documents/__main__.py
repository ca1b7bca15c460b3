"""Compare one group of all ranks with groups of different size, for documents of mixed lengths.

Six ways to share the documents of a step are predicted for LLaMA 3 8B, with the same documents and
the same tokens. Longmesh has two of them: one group of all ranks, and a group for each node; both
use ``exchange`` in the layout ``balanced``. The third gives micro-batches to nodes by their work.
The others are groups by length in their best case, by Megatron's own scheduler, and groups of one
size, the baseline of published speedups. The third to fifth are predicted for several limits of
tokens on a rank, and the fastest counts. All is predicted; ``bench.link.documents`` measures.

    python -m bench.documents                                   # all kinds of data, 20 minutes
    python -m bench.documents --kinds chats --ranks 8 --draws 3
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.documents import cost
from bench.documents.cost import Machine, Outcome
from bench.documents.groups import (
    ScheduleError,
    Turn,
    Waves,
    fixed,
    group_size,
    longest_first,
    megatron,
)
from bench.documents.lengths import Kind, load_kinds, micro_batches
from bench.documents.report import WAYS, line_of, markdown
from planner.cluster import load_cluster
from planner.levers import FFN_CHUNK, LOSS_CHUNK
from planner.step_shape import Arrangement
from planner.workload import workload_of
from runtime.errors import UserError
from runtime.machine import ROOT, commit_of
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import write_tables
from train.config.language import parse_args

Row = dict[str, Any]
MODEL = "llama3_8b"
KERNEL = "flash_attn_3"
"""Attention kernel of all ways: the fastest for packed documents, so that links hide least."""
SAVED = Arrangement(
    strategy="zero1",
    recompute="attention_boundary",
    loss_chunk=LOSS_CHUNK,
    ffn_chunk=FFN_CHUNK,
)
"""Memory settings of all ways. With zero1, as with Megatron's distributed optimizer, gradients are
summed once a step, and micro-batches need no exchange of all ranks."""
RANKS = (8, 16, 32, 64)
SLOW_GB_PER_S = (5.0, 1.25)
"""Rates of a rank's link to other nodes in further tables: 400 and 100 Gbit/s for a node of 8."""
HALVINGS = 3
"""Number of times that the limit of tokens on a rank is halved, to try smaller ones."""


def machine_of(cluster_name: str, ranks: int, between: float | None = None) -> Machine:
    """Return ``ranks`` ranks of a cluster file that train the model.

    ``between`` is the rate of a rank's link to other nodes in GB/s, by default the file's.
    """
    path = ROOT / "configs" / "models" / f"{MODEL}.toml"
    flags = f"--config {path} --data-path none --tokenizer-model none"
    config = parse_args([*flags.split(), "--reset-attention-mask", "--reset-position-ids"])
    work = replace(workload_of(config, 1, "cuda"), micro_batches=2)
    cluster = load_cluster(cluster_name).running(KERNEL)
    if between:
        cluster = replace(cluster, between_gb_per_s=between)
    return Machine(work, SAVED, cluster, ranks)


def one_group(machine: Machine, kind: Kind, draw: int) -> tuple[Outcome, list[int]]:
    """Predict a step over all ranks; return also its documents, for the other ways.

    The number of tokens on a rank is the largest with which all micro-batches fit into memory.

    Raises ScheduleError if a micro-batch of that size is too small for the longest document.
    """
    ranks = machine.ranks
    total = kind.step_tokens(ranks)
    for capacity in cost.CAPACITIES:
        if kind.capacity and capacity > kind.capacity:
            continue
        count = -(-total // (capacity * ranks))
        tokens = total // (count * ranks) * ranks
        if not machine.fits(cost.ring_plan(tokens // ranks, 1)):
            continue
        documents = kind.documents(np.random.default_rng(draw), tokens * count)
        group_size(int(documents.max()), tokens // ranks, ranks)
        batches = micro_batches(documents, tokens)
        plans = cost.plans_of(machine, batches)
        if all(map(machine.fits, plans)):
            shuffled = np.random.default_rng(draw).permutation(np.concatenate(batches))
            return cost.one_group(machine, plans), shuffled.tolist()
    raise ScheduleError(f"{kind.title}: no micro-batch fits into memory; give more --ranks")


def best(capacity: int, predict: Callable[[int], Outcome | None]) -> Outcome | None:
    """Return the fastest outcome over limits of tokens on a rank: ``capacity``, half of it, ...

    Limits with which documents need more ranks than there are, or a scheduler fails, are skipped.
    """
    fastest = None
    for power in range(HALVINGS + 1):
        try:
            outcome = predict(capacity >> power)
        except ScheduleError:
            outcome = None
        if outcome and (fastest is None or outcome.seconds < fastest.seconds):
            fastest = outcome
    return fastest


def node_groups(
    machine: Machine, lengths: Sequence[int], capacity: int, *, by_work: bool
) -> Outcome | None:
    """Predict a group for each node; None if documents or micro-batches do not fit.

    The micro-batches have ``capacity`` tokens on a rank, or slightly less.
    """
    per_node = machine.cluster.gpus_per_node
    nodes = machine.ranks // per_node
    total = sum(lengths)
    count = -(-total // (capacity * machine.ranks)) * nodes
    if nodes < 2 or total % count or max(lengths) > total // count:
        return None
    batches = micro_batches(np.array(lengths), total // count)
    name = WAYS[2] if by_work else WAYS[1]
    outcome = cost.group_a_node(machine, name, batches, by_work=by_work)
    fits = outcome.memory <= cost.ROOM * 1e9 * machine.cluster.memory_gb
    return outcome if fits else None


def outcomes(machine: Machine, kind: Kind, draw: int) -> dict[str, Outcome]:
    """Predict a step of each way for one draw of documents, keyed by way.

    Raises ScheduleError if the documents do not fit on the ranks.
    """
    ranks = machine.ranks
    ours, lengths = one_group(machine, kind, draw)
    capacity = kind.capacity or machine.group_capacity
    size = group_size(kind.max_length, capacity, ranks)
    first = None
    for power in range(HALVINGS + 1):
        first = first or node_groups(machine, lengths, capacity >> power, by_work=False)

    def seconds(turn: Turn) -> float:
        return cost.turn_seconds(machine, turn)

    def grouped(name: str, waves: Waves, limit: int) -> Outcome:
        return cost.grouped(machine, name, waves, limit)

    by_length = best(
        capacity,
        lambda limit: grouped(WAYS[3], longest_first(lengths, ranks, limit, seconds), limit),
    )
    by_megatron = best(
        capacity,
        lambda limit: grouped(WAYS[4], megatron(lengths, ranks, limit), limit),
    )
    by_work = best(
        capacity,
        lambda limit: node_groups(machine, lengths, limit, by_work=True),
    )
    baseline = grouped(WAYS[5], fixed(lengths, ranks, capacity, size), capacity)
    ways = (ours, first, by_work, by_length, by_megatron, baseline)
    return {outcome.name: outcome for outcome in ways if outcome}


def rows_of(machine: Machine, kind: Kind, draws: int) -> list[Row]:
    """Return a row for each way, with means over draws.

    If the documents do not fit on the ranks, print why, and return no row.
    """
    drawn: dict[str, list[Outcome]] = {}
    for draw in range(draws):
        try:
            for way, outcome in outcomes(machine, kind, draw).items():
                drawn.setdefault(way, []).append(outcome)
        except ScheduleError as error:
            print(f"{kind.title}, {machine.ranks} ranks: left out, {error}", flush=True)
            return []

    rows: list[Row] = []
    for way, members in drawn.items():
        step = fmean(outcome.seconds for outcome in members) + machine.exchange_seconds
        sizes = sorted({size for outcome in members for size in outcome.sizes})
        row = {
            "link": machine.cluster.between_gb_per_s,
            "kind": kind.name,
            "title": kind.title,
            "ranks": machine.ranks,
            "way": way,
            "step": step,
            "ratio": step / (rows[0]["step"] if rows else step),
            "idle": fmean(outcome.idle for outcome in members),
            "inside": fmean(outcome.sent.inside for outcome in members),
            "between": fmean(outcome.sent.between for outcome in members),
            "memory": max(outcome.memory for outcome in members),
            "capacity": max(outcome.capacity for outcome in members),
            "sizes": " ".join(map(str, sizes)),
            "exchange": machine.exchange_seconds,
        }
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def kind_row(kind: Kind) -> Row:
    """Return what the table of kinds shows: the documents of the first draw of a step, 8 ranks."""
    tokens = kind.step_tokens(8)
    lengths = kind.documents(np.random.default_rng(0), tokens)
    return {
        "title": kind.title,
        "tokens": tokens,
        "documents": len(lengths),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "source": kind.source.strip(),
    }


def build_parser() -> argparse.ArgumentParser:
    """Define the command line of ``python -m bench.documents``."""
    parser = parser_for("python -m bench.documents", __doc__)
    add = parser.add_argument
    kinds = tuple(load_kinds())
    add("--kinds", nargs="+", choices=kinds, default=list(kinds), help="default: all")
    ranks = "numbers of ranks, powers of two (default: 8 16 32 64)"
    add("--ranks", nargs="+", type=positive, default=list(RANKS), metavar="N", help=ranks)
    add("--cluster", default="h100_pod", help="cluster file, as of tools.plan (default: h100_pod)")
    draws = "number of steps to draw documents for (default: %(default)s)"
    add("--draws", type=positive, default=1, metavar="N", help=draws)
    results = "also write documents.md and documents.jsonl to this folder"
    add("--results", type=Path, metavar="FOLDER", help=results)
    return parser


def predictions(args: argparse.Namespace) -> Row:
    """Predict all settings of a command line, and print a line for each way."""
    kinds = load_kinds()
    steps: list[Row] = []
    machines = []
    for ranks in args.ranks:
        machines.append(machine_of(args.cluster, ranks))
    for between in SLOW_GB_PER_S:
        machines.append(machine_of(args.cluster, max(args.ranks), between))
    for machine in machines:
        for name in args.kinds:
            steps += rows_of(machine, kinds[name], args.draws)
    return {"steps": steps, "kinds": [kind_row(kinds[name]) for name in args.kinds]}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Predict, and print and write a report."""
    args = build_parser().parse_args(argv)
    for ranks in args.ranks:
        if ranks & (ranks - 1):
            raise UserError(f"--ranks has {ranks}; groups halve, so give powers of two")
    title = "Documents of mixed lengths: one group of all ranks, and groups by length"
    result = {
        "benchmark": title,
        "model": MODEL,
        "cluster": args.cluster,
        "draws": args.draws,
        "strategy": SAVED.strategy,
        "recompute": SAVED.recompute,
        "commit": commit_of(),
    }
    result |= predictions(args)
    setting = (
        f"Predicted. {MODEL}, {SAVED.strategy}, {SAVED.recompute}, attention by {KERNEL}; "
        f"documents drawn for {args.draws} step(s); commit {result['commit']}"
    )
    text = "\n".join([f"# {title}", "", setting + ".", *markdown(result), ""])
    print("\n" + text)
    if args.results:
        path = write_tables(args.results / "documents.jsonl", result, text)
        print(f"wrote {path} and its .jsonl")


if __name__ == "__main__":
    run_command(main)
