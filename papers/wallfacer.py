"""WallFacer (Liu et al. 2024, arXiv:2407.00611): the tables of the paper.

Volumes, memory, gains over Ring Attention, and supported lengths.

    python -m papers.wallfacer
    python -m papers.wallfacer --table volumes --measure  # bytes counted on 8 processes
    python -m papers.wallfacer --table links --measure    # training steps on emulated links

The paper's clusters have fast links between the 16 or 8 GPUs of a node, and slow ones between
nodes; papers/links.py emulates such clusters.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from papers import ring, rows
from papers.links import link_gains
from papers.table import TableRow
from parallel.context import Plan, context_parallel, make_plan
from planner.cluster import CLUSTERS, Cluster, load_cluster
from planner.step_cost import predict
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from runtime.machine import device_name
from runtime.ranks import run_ranks
from tools.common.arguments import run_command

GIB = 2**30
K = 1024
RANKS = 8
TOKENS = 1024
HEADS = 4
WIDTH = 32
"""Sizes of the case in which bytes are counted, from RANKS to WIDTH: processes, tokens, heads, and
channels per head. It runs in bfloat16."""
EXAMPLE = {"tokens": 65536, "hidden": 6656, "ranks": 64, "team": 4}
"""Sizes of section 3.2.2's worked example, LLaMA 30B with 64 layers; ``team`` is C, the number of
ranks in a team."""
EXAMPLE_HEADS = 52
EXAMPLE_WIDTH = 128


def volumes_of(tokens: int, hidden: int, ranks: int, team: int) -> tuple[float, float]:
    """Return a rank's point-to-point and collective bytes in a bfloat16 forward pass.

    This is equations 2 to 4. Keys and values go around a ring of teams, which gets shorter as teams
    get larger; within a team, queries, keys, values and outputs are gathered and scattered.
    """
    point_to_point = 2 * 2 * tokens * hidden / team
    collective = 2 * 4 * tokens * hidden * (team - 1) / ranks
    return point_to_point, collective


def planned(plan: Plan, heads: int, width: int) -> tuple[int, int]:
    """Return the point-to-point and collective bytes that rank 1 sends under Longmesh's plan.

    The bytes are those of a bfloat16 forward pass with heads of ``width`` channels.
    """
    forward = plan.cost(
        1, batch=1, heads=heads, kv_heads=heads, head_dim=width, element_size=2
    ).forward
    return forward.p2p.total(), forward.collective.total()


def count(
    rank: int, world_size: int, cases: Iterable[tuple[str, dict[str, Any], bool]]
) -> list[tuple[int, int]]:
    """Return the bytes that this rank sends in each case's forward pass, in ``planned``'s form.

    Args:
        cases: each has a method, its options, and True if attention is linear.
    """
    sent = []
    for method, options, linear in cases:
        cp = context_parallel(method, seq_len=TOKENS, group=dist.group.WORLD, **options)
        x = torch.zeros(1, cp.plan.local_len, HEADS, WIDTH, dtype=torch.bfloat16)  # [B, T, H, D]
        if linear:
            cp.attend_linear(x, x, x, [0.0] * HEADS)
        else:
            cp.attend(x, x, x)
        traffic = cp.transport.traffic
        sent.append((traffic.p2p.total(), traffic.collective.total()))
    return sent


def here(ranks: int) -> str:
    """Return a description of the machine and the sizes for which bytes were counted."""
    return f"{device_name('cpu')}, {ranks} processes, {TOKENS:,} tokens, width {HEADS * WIDTH}"


def volumes(measured: bool = False) -> list[TableRow]:
    """Return the volumes of the worked example in GiB, and the bytes that 8 processes send.

    The processes run a smaller case, with teams of 2 instead of the paper's 4.
    """
    hardware = "any"
    counts: list[tuple[int, int]] = []
    if measured:
        hardware = f"{here(RANKS)}, with C = 2 for 4"
        cases = [("wallfacer", {"team_size": team}, False) for team in (1, 2)]
        counts = run_ranks(count, RANKS, cases)[1]

    parts = ("point to point", "collective")
    published = {(1, 0): 1.625, (4, 1): 0.152, (4, 0): 0.406}
    table = []
    totals = {"gib": 0.0, "our_plan": 0.0}
    for (team, part), gib in published.items():
        tokens = EXAMPLE["tokens"]
        ranks = EXAMPLE["ranks"]
        plan = make_plan("wallfacer", seq_len=tokens, size=ranks, team_size=team)

        plan_bytes = planned(plan, EXAMPLE_HEADS, EXAMPLE_WIDTH)[part]
        formula_bytes = volumes_of(tokens, EXAMPLE["hidden"], ranks, team)[part]
        analytic = {"gib": formula_bytes / GIB, "our_plan": plan_bytes / GIB}

        sent = None
        if measured:
            small_formula = volumes_of(TOKENS, HEADS * WIDTH, RANKS, min(team, 2))[part]
            sent = {"bytes": counts[team > 1][part], "formula_bytes": small_formula}

        labels = {"way": "Ring" if team == 1 else "WallFacer, C = 4", "part": parts[part]}
        table.append(TableRow(labels, {"gib": gib}, analytic, hardware, sent))
        if team > 1:
            totals = {name: totals[name] + value for name, value in analytic.items()}

    labels = {"way": "WallFacer, C = 4", "part": "together"}
    return [*table, TableRow(labels, {"gib": 0.558}, totals, hardware)]


def memory() -> list[TableRow]:
    """Return the peak memory of activations for 64 layers, in units of BNH/P (equations 6 and 7).

    It consists of 65 checkpoints, and of 3 tensors of a whole team, each ``team`` times as large as
    a rank's.
    """
    table = []
    for team, peak in ((1, 68), (4, 77)):
        table.append(TableRow({"C": team}, {"a": peak}, {"a": 64 + 1 + 3 * team}, "any"))
    return table


@lru_cache
def model(name: str) -> tuple[StepShape, bool]:
    """Return the work of a bfloat16 step of a model of table 3, and True if it is causal.

    The paper does not state GPT's vocabulary; GPT-2's is used.
    """
    models = {row["model"]: row for row in rows.published("wallfacer_models")}
    row = models[name]
    heads = int(row["heads"])
    layers = int(row["layers"])
    hidden = int(row["hidden"])
    causal = name.startswith("GPT")
    vocab = 50304 if causal else 0

    products = 12 * hidden**2 * layers + vocab * hidden
    modulation = 0 if causal else 6 * hidden**2 * layers  # a DiT's adaptive norms
    work = replace(
        ring.model("7B"),
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        gated=False,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        parameters=products + modulation,
        matrix_weights=products,
        element_size=2,
    )
    return work, causal


def seconds(work: StepShape, plan: Plan, cluster: Cluster, hidden: bool) -> float:
    """Return the seconds of a step with ZeRO-2 and checkpoints after the attention.

    Without overlap, they are the sum of two predictions: one with free links, one with free
    computing.

    Args:
        hidden: True if sends overlap with computing; otherwise the times of both are added.
    """
    arranged = Arrangement(strategy="zero2", recompute="attention_boundary", loss_chunk=2048)
    if hidden:
        return predict(work, plan, arranged, cluster).time
    free_links = replace(
        cluster,
        inside_gb_per_s=1e9,
        between_gb_per_s=1e9,
        inside_latency_us=0,
        between_latency_us=0,
    )
    free_computing = replace(cluster, peak_tflops=1e9, launch_us=0)
    computing = predict(work, plan, arranged, free_links).time
    return computing + predict(work, plan, arranged, free_computing).time


def gain(name: str, cluster: Cluster, ranks: int, tokens: int, hidden: bool) -> tuple[int, float]:
    """Return the faster team size (2 or 4), and its gain in throughput over Ring in percent.

    Ring is zigzag for a causal model, whose work a plain ring does not balance; a team has the
    faster of the two placements.
    """
    work, causal = model(name)
    shape: dict[str, Any] = {"seq_len": tokens, "size": ranks, "causal": causal}
    ring_plan = make_plan("zigzag" if causal else "ring", **shape, backward="kv")
    base = seconds(work, ring_plan, cluster, hidden)

    times = {}
    for team in (2, 4):
        by_placement = []
        for placement in ("collect_intra", "p2p_intra"):
            plan = make_plan("wallfacer", **shape, team_size=team, placement=placement)
            by_placement.append(seconds(work, plan, cluster, hidden))
        times[team] = min(by_placement)
    best = min(times, key=lambda team: times[team])
    return best, round(float(100 * (base / times[best] - 1)), 1)


BEST = {"wallfacer_a100_16": 2, "wallfacer_a100_8": 4}
"""Best team size (C) in section 4.1, keyed by cluster; the section states none for the H100
cluster."""
SETTINGS = [
    (name, model, 32, length)
    for name in BEST
    for model in ("DiT 1B", "GPT 3B")
    for length in (128, 512)
]
SETTINGS += [
    ("wallfacer_h100", "GPT 7B", 32, 128),
    ("wallfacer_h100", "GPT 7B", 32, 512),
    ("wallfacer_h100", "GPT 7B", 64, 128),
]
STATED = {("wallfacer_h100", 64): 60.71}


def gains() -> Iterator[TableRow]:
    """Yield the predicted best team and its gain for each setting."""
    for name, work, ranks, length in SETTINGS:
        cluster = load_cluster(CLUSTERS / f"{name}.toml")
        team, percent = gain(work, cluster, ranks, length * K, hidden=False)
        team_hidden, percent_hidden = gain(work, cluster, ranks, length * K, hidden=True)

        labels: dict[str, str | int] = {
            "cluster": cluster.name,
            "run": f"{work}, {ranks} GPUs",
            "ktokens": length,
        }
        published = {"team": BEST.get(name), "gain_percent": STATED.get((name, ranks))}
        predictions = {
            "team": team,
            "gain_percent": percent,
            "team_hidden": team_hidden,
            "gain_hidden_percent": percent_hidden,
        }
        yield TableRow(labels, published, predictions, cluster.name)


def supported() -> Iterator[TableRow]:
    """Yield the rows of supported lengths: whether each fits 8 A100 of 80 GB.

    The runs train in bfloat16 with ZeRO-2. Each layer keeps its attention's output and recomputes
    the rest in the backward pass (``attention_boundary``).
    """
    arranged = Arrangement(
        strategy="zero2", recompute="attention_boundary", loss_chunk=2048, ffn_chunk=2048
    )
    for row in rows.published("wallfacer_supported_length"):
        work = replace(ring.model(row["model"]), element_size=2)
        length = int(row["ktokens"])
        gigabytes = {}
        for way, team in (("ring_attention", 1), ("wallfacer", 2)):
            plan = make_plan("wallfacer", seq_len=length * K, size=8, team_size=team)
            gigabytes[way] = sum(memory_of(work, plan, arranged).values()) / 1e9

        published = {way: row[way] for way in gigabytes}
        predictions = {way: "yes" if size <= 80 else "no" for way, size in gigabytes.items()}
        for way, size in gigabytes.items():
            predictions[f"{way}_gb"] = f"{size:.1f}"
        labels: dict[str, str | int] = {"model": row["model"], "ktokens": length}
        yield TableRow(labels, published, predictions, "8 A100")


TABLES: rows.TableFunctions = {
    "volumes": volumes,
    "memory": memory,
    "gains": gains,
    "links": link_gains,
    "supported_length": supported,
}
main = partial(rows.main, "wallfacer", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
