"""Compare one group of all ranks with groups of different size, for documents of mixed lengths.

Ways to share the documents of a step are predicted for LLaMA 3 8B, with the same documents and the
same tokens. Longmesh has two of them: one group of all ranks, and groups of one size, each with its
own micro-batches; both by the fastest of its methods for packed documents. The third gives
micro-batches to these groups by their work. The others are groups by length in their best case,
also with gradients in float32, by Megatron's own scheduler, and rings of one size, the baseline of
published speedups. All are predicted for several limits of tokens on a rank, and the fastest
counts. All is predicted; ``bench.link.documents`` measures.

    python -m bench.documents                                   # all kinds of data, 5 minutes
    python -m bench.documents --kinds chats --ranks 8 --draws 3
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.documents import cost
from bench.documents.cost import METHODS, Machine, Method, Outcome
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
RANKS = (64,)
SLOW_GB_PER_S = (40.0, 10.0)
"""Rates of a node's shared link in further tables: 400 and 100 Gbit/s, 80 % of it assumed."""
HALVINGS = 3
"""Number of times that the limit of tokens on a rank is halved, to try smaller ones."""
NEAR = 1.01
"""A search for a faster setting ends once a step takes less than this times its computing."""


def machine_of(cluster_name: str, ranks: int, between: float | None = None) -> Machine:
    """Return ``ranks`` ranks of a cluster file that train the model.

    ``between`` is the rate of a link to other nodes that a node's ranks share, in GB/s; by default
    the links are the file's.
    """
    path = ROOT / "configs" / "models" / f"{MODEL}.toml"
    flags = f"--config {path} --data-path none --tokenizer-model none"
    config = parse_args([*flags.split(), "--reset-attention-mask", "--reset-position-ids"])
    work = replace(workload_of(config, 1, "cuda"), micro_batches=2)
    cluster = load_cluster(cluster_name).running(KERNEL)
    if between:
        cluster = replace(cluster, between_gb_per_s=between, between_link="node")
    return Machine(work, SAVED, cluster, ranks)


def methods_of(machine: Machine, size: int) -> tuple[Method, ...]:
    """Return the methods to try for groups of ``size`` ranks; in a node exchange is the fastest."""
    per_node = machine.cluster.gpus_per_node
    is_inside = size <= per_node or machine.work.kv_heads % per_node
    return METHODS[:1] if is_inside else METHODS


def one_group(machine: Machine, kind: Kind, draw: int) -> tuple[Outcome, list[int]]:
    """Predict a step over all ranks; return also its documents, for the other ways.

    The number of tokens on a rank is the largest with which all micro-batches fit into memory.

    Raises ScheduleError if a micro-batch of that size is too small for the longest document.
    """
    fastest = None
    for method in methods_of(machine, machine.ranks):
        outcome, documents = _one_group_by(machine, kind, draw, method)
        if fastest is None or outcome.seconds < fastest[0].seconds:
            fastest = outcome, documents
        if fastest[0].seconds < NEAR * fastest[0].computing:
            break
    assert fastest
    return fastest


def _one_group_by(
    machine: Machine, kind: Kind, draw: int, method: Method
) -> tuple[Outcome, list[int]]:
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
        plans = cost.plans_of(machine, batches, method)
        if all(map(machine.fits, plans)):
            shuffled = np.random.default_rng(draw).permutation(np.concatenate(batches))
            return cost.one_group(machine, plans, method), shuffled.tolist()
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


def group_parts(
    machine: Machine, lengths: Sequence[int], capacity: int, size: int, method: Method
) -> list[Outcome]:
    """Predict the micro-batches of groups of one size; empty if they do not fit.

    The micro-batches have ``capacity`` tokens on a rank, or slightly less.
    """
    groups = machine.ranks // size
    total = sum(lengths)
    count = -(-total // (capacity * machine.ranks)) * groups
    if groups < 2 or total % count or max(lengths) > total // count:
        return []
    if not machine.fits(cost.ring_plan(total // count // size, 1)):
        return []
    batches = micro_batches(np.array(lengths), total // count)
    parts = cost.parts_of(machine, size, method, batches)
    room = cost.ROOM * 1e9 * machine.cluster.memory_gb
    return parts if max(part.memory for part in parts) <= room else []


def equal_groups(
    machine: Machine, lengths: Sequence[int], capacity: int, sizes: Sequence[int]
) -> tuple[Outcome | None, Outcome | None]:
    """Return the fastest groups of one size: with micro-batches in turn, and by their work.

    For groups of a node's ranks all limits of tokens are tried; for larger ones exchange in all its
    settings, by the largest limit that fits. None if nothing fits.
    """
    in_turn: list[Outcome] = []
    by_work: list[Outcome] = []
    for size in sizes:
        max_limits = HALVINGS + 1 if size == machine.cluster.gpus_per_node else 1
        for method in methods_of(machine, size):
            if method.name != METHODS[0].name:
                continue
            fitting: list[list[Outcome]] = []
            for power in range(HALVINGS + 1):
                parts = []
                if len(fitting) < max_limits:
                    parts = group_parts(machine, lengths, capacity >> power, size, method)
                if parts:
                    fitting.append(parts)
            for parts in fitting:
                in_turn.append(cost.equal_groups(machine, WAYS[1], parts, by_work=False))
                by_work.append(cost.equal_groups(machine, WAYS[2], parts, by_work=True))
    return _fastest(in_turn), _fastest(by_work)


def _fastest(outcomes: Sequence[Outcome]) -> Outcome | None:
    return min(outcomes, key=lambda outcome: outcome.seconds, default=None)


def outcomes(machine: Machine, kind: Kind, draw: int) -> dict[str, Outcome]:
    """Predict a step of each way for one draw of documents, keyed by way.

    Raises ScheduleError if the documents do not fit on the ranks.
    """
    ranks = machine.ranks
    ours, lengths = one_group(machine, kind, draw)
    capacity = kind.capacity or machine.group_capacity
    # Groups of several nodes can be faster only if links slow one group down.
    size = machine.cluster.gpus_per_node
    sizes = [size] if size < ranks else []
    while ours.seconds > NEAR * ours.computing and 2 * size < ranks:
        size *= 2
        sizes.append(size)
    in_turn, by_work = equal_groups(machine, lengths, capacity, sizes)

    def by_length(name: str, group_machine: Machine) -> Outcome | None:
        def seconds(turn: Turn) -> float:
            return cost.turn_seconds(group_machine, turn)

        def predict(limit: int) -> Outcome:
            waves = longest_first(lengths, ranks, limit, seconds)
            return cost.grouped(group_machine, name, waves, limit)

        return best(capacity, predict)

    def grouped(name: str, waves: Waves, limit: int) -> Outcome:
        return cost.grouped(machine, name, waves, limit)

    def baseline(limit: int) -> Outcome | None:
        sizes = []
        size = group_size(kind.max_length, limit, ranks)
        while size <= ranks:
            sizes.append(grouped(WAYS[6], fixed(lengths, ranks, limit, size), limit))
            size *= 2
        return _fastest(sizes)

    ways = (
        ours,
        in_turn,
        by_work,
        by_length(WAYS[3], machine),
        by_length(WAYS[4], replace(machine, ring_gradient_bytes=4)),
        best(capacity, lambda limit: grouped(WAYS[5], megatron(lengths, ranks, limit), limit)),
        best(capacity, baseline),
    )
    return {outcome.name: outcome for outcome in ways if outcome}


def link_of(machine: Machine) -> str:
    """Return the rate of the links to other nodes, in words."""
    cluster = machine.cluster
    share = "from each rank" if cluster.between_link == "rank" else "shared by the ranks of a node"
    return f"{cluster.between_gb_per_s:g} GB/s {share}"


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
        exposed = fmean(machine.exposed_seconds(outcome.computing) for outcome in members)
        step = fmean(outcome.seconds for outcome in members) + exposed
        sizes = sorted({size for outcome in members for size in outcome.sizes})
        row = {
            "link": link_of(machine),
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
            "method": members[0].method,
            "exchange": exposed,
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
    ranks = "numbers of ranks, powers of two (default: 64)"
    add("--ranks", nargs="+", type=positive, default=list(RANKS), metavar="N", help=ranks)
    add("--cluster", default="h100_pod", help="cluster file, as of tools.plan (default: h100_pod)")
    draws = "number of steps to draw documents for (default: %(default)s)"
    add("--draws", type=positive, default=1, metavar="N", help=draws)
    results = "also write documents.md and documents.jsonl to this folder"
    add("--results", type=Path, metavar="FOLDER", help=results)
    return parser


def kind_rows(name: str, cluster: str, ranks: Sequence[int], draws: int) -> list[Row]:
    """Return the rows of a kind of data for all ranks and links."""
    kind = load_kinds()[name]
    machines = []
    for number in ranks:
        machines.append(machine_of(cluster, number))
    for between in SLOW_GB_PER_S:
        machines.append(machine_of(cluster, max(ranks), between))
    rows: list[Row] = []
    for machine in machines:
        rows += rows_of(machine, kind, draws)
    return rows


def predictions(args: argparse.Namespace) -> Row:
    """Predict all settings of a command line, a kind in each process; print a line for each way."""
    kinds = load_kinds()
    steps: list[Row] = []
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        jobs = []
        for name in args.kinds:
            jobs.append(pool.submit(kind_rows, name, args.cluster, args.ranks, args.draws))
        for job in jobs:
            steps += job.result()
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
