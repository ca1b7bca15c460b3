"""WallFacer (Liu et al. 2024, arXiv:2407.00611): volumes, memory, gains over Ring Attention,
supported lengths.

python -m papers.wallfacer python -m papers.wallfacer --table volumes --measure     # bytes counted
on 8 processes python -m papers.wallfacer --table links --measure       # training steps of 8 ranks
on emulated links

The paper's clusters have fast links between the 16 or 8 GPUs of a node, and slow ones between
nodes. In the table of links 100 Mbit/s join two nodes of 4 processes, one link for each node or for
each rank; a DiT and a GPT of 2 layers train on them, beside the planner's prediction.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.link.cases import CLUSTERS as LINK_CLUSTERS
from bench.link.cases import RANKS as LINK_RANKS
from bench.link.cases import VOCAB_SIZE, cases_of, command_line, corpus, data_of
from bench.link.network import LINKS, Network, prepare_machine
from bench.link.ranks import calibrated, train
from papers import ring, rows
from papers.rows import Row
from parallel.context import Plan, context_parallel, make_plan
from planner.cluster import CLUSTERS, Cluster, load_cluster
from planner.search import predicted
from planner.step_cost import predict
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from runtime.machine import device_name
from runtime.ranks import run_ranks
from tools.common.arguments import run_command
from tools.common.shapes import AttentionShape
from train.config import diffusion
from train.config.derive import with_vocabulary
from train.config.language import parse_args

GIB, K = 2**30, 1024
RANKS, TOKENS, HEADS, WIDTH = 8, 1024, 4, 32
"""Sizes of the measurement: processes, tokens, heads and their width; bfloat16."""
EXAMPLE = {"tokens": 65536, "hidden": 6656, "ranks": 64, "team": 4}
"""LLaMA 30B of section 3.2.2, with 64 layers."""


def volumes_of(tokens: int, hidden: int, ranks: int, team: int) -> tuple[float, float]:
    """Return the bytes that a rank sends in a bfloat16 forward, point to point and in collectives
    (eq. 2 to 4).
    """
    return 2 * 2 * tokens * hidden / team, 2 * 4 * tokens * hidden * (team - 1) / ranks


def planned(plan: Plan, heads: int, width: int) -> tuple[int, int]:
    """Return what our plan sends in a bfloat16 forward: the bytes of rank 1, point to point and in
    collectives.
    """
    sent = plan.cost(
        1, batch=1, heads=heads, kv_heads=heads, head_dim=width, element_size=2
    ).forward
    return sent.p2p.total(), sent.collective.total()


def count(
    rank: int, world_size: int, cases: Iterable[tuple[str, dict[str, Any], bool]]
) -> list[tuple[int, int]]:
    """Return what this rank counts in the forward of (method, options, linear attention), as
    ``planned`` does.
    """
    sent = []
    for method, options, linear in cases:
        cp = context_parallel(method, seq_len=TOKENS, group=dist.group.WORLD, **options)
        x = torch.zeros(1, cp.plan.local_len, HEADS, WIDTH, dtype=torch.bfloat16)
        _ = cp.attend_linear(x, x, x, [0.0] * HEADS) if linear else cp.attend(x, x, x)
        sent.append((cp.transport.traffic.p2p.total(), cp.transport.traffic.collective.total()))
    return sent


def here(ranks: int) -> str:
    """Describe where bytes were counted."""
    return f"{device_name('cpu')}, {ranks} processes, {TOKENS:,} tokens, width {HEADS * WIDTH}"


def volumes(measured: bool = False) -> list[Row]:
    """Return the volumes of the worked example, in GiB, and what 8 processes of a small one send,
    in bytes.
    """
    cases = [("wallfacer", {"team_size": team}, False) for team in (1, 2)]
    small = run_ranks(count, RANKS, cases)[1] if measured else []
    made, where = [], f"{here(RANKS)}, with C = 2 for 4" if measured else "any"
    published = {(1, 0): 1.625, (4, 1): 0.152, (4, 0): 0.406}
    for (team, part), gib in published.items():
        shape = EXAMPLE | {"team": team}
        ours = planned(
            make_plan("wallfacer", seq_len=shape["tokens"], size=shape["ranks"], team_size=team),
            52,
            128,
        )
        formula = volumes_of(TOKENS, HEADS * WIDTH, RANKS, min(team, 2))[part]
        labels = {
            "way": "Ring" if team == 1 else "WallFacer, C = 4",
            "part": ("point to point", "collective")[part],
        }
        sent = {"bytes": small[team > 1][part], "formula_bytes": formula} if measured else None
        analytic = {"gib": volumes_of(**shape)[part] / GIB, "our_plan": ours[part] / GIB}
        made.append(Row(labels, {"gib": gib}, analytic, where, sent))
    whole = {name: made[1].analytic[name] + made[2].analytic[name] for name in ("gib", "our_plan")}  # type: ignore[operator]
    return [
        *made,
        Row({"way": "WallFacer, C = 4", "part": "together"}, {"gib": 0.558}, whole, where),
    ]


def memory() -> list[Row]:
    """Return the peak of activations in BNH/P, for 64 layers: 65 checkpoints, and 3 tensors of a
    team (eq. 6, 7).
    """
    return [
        Row({"C": team}, {"a": a}, {"a": 64 + 1 + 3 * team}, "any")
        for team, a in ((1, 68), (4, 77))
    ]


@lru_cache
def model(name: str) -> tuple[StepShape, bool]:
    """Return a step of a model of table 3 in bfloat16, and whether it is causal; GPT-2's vocabulary
    is our choice.
    """
    row = next(row for row in rows.published("wallfacer_models") if row["model"] == name)
    causal, heads, layers, hidden = (
        name.startswith("GPT"),
        *(int(row[key]) for key in ("heads", "layers", "hidden")),
    )
    vocab = 50304 if causal else 0
    products = 12 * hidden**2 * layers + vocab * hidden
    work = replace(
        ring.model("7B"), layers=layers, hidden=hidden, ffn=4 * hidden, gated=False, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=vocab, parameters=products + (0 if causal else 6 * hidden**2 * layers),
        matrix_weights=products, element_size=2,
    )  # fmt: skip
    return work, causal


def seconds(work: StepShape, plan: Plan, cluster: Cluster, hidden: bool) -> float:
    """Return the time of a step with ZeRO-2 and checkpoints behind the attention; sends hidden by
    computing, or not.
    """
    arranged = Arrangement(strategy="zero2", recompute="attention_boundary", loss_chunk=2048)
    if hidden:
        return predict(work, plan, arranged, cluster).time
    free = {
        "inside_gb_per_s": 1e9,
        "between_gb_per_s": 1e9,
        "inside_latency_us": 0,
        "between_latency_us": 0,
    }
    apart = (replace(cluster, **free), replace(cluster, peak_tflops=1e9, launch_us=0))  # type: ignore[arg-type]
    return sum(predict(work, plan, arranged, part).time for part in apart)


def gain(name: str, cluster: Cluster, ranks: int, tokens: int, hidden: bool) -> tuple[int, float]:
    """Return the team size (2 or 4) that the planner finds faster, and its gain in throughput over
    Ring in percent.
    """
    work, causal = model(name)
    common = {"seq_len": tokens, "size": ranks, "causal": causal}
    base = seconds(
        work, make_plan("zigzag" if causal else "ring", **common, backward="kv"), cluster, hidden
    )  # type: ignore[arg-type]
    times = {
        team: min(
            seconds(
                work,
                make_plan("wallfacer", **common, team_size=team, placement=placement),
                cluster,
                hidden,
            )  # type: ignore[arg-type]
            for placement in ("collect_intra", "p2p_intra")
        )
        for team in (2, 4)
    }
    best = min(times, key=lambda team: times[team])
    return best, round(float(100 * (base / times[best] - 1)), 1)


BEST = {"wallfacer_a100_16": 2, "wallfacer_a100_8": 4}
"""Section 4.1: the best C by cluster; of the H100 cluster it says nothing."""
SETTINGS = [
    (name, model, 32, length)
    for name in BEST
    for model in ("DiT 1B", "GPT 3B")
    for length in (128, 512)
]
SETTINGS += [
    ("wallfacer_h100", "GPT 7B", ranks, length)
    for ranks, length in ((32, 128), (32, 512), (64, 128))
]
STATED = {("wallfacer_h100", 64): 60.71}


def gains() -> Iterator[Row]:
    """Yield the predicted best team and its gain by setting."""
    for name, work, ranks, length in SETTINGS:
        cluster = load_cluster(CLUSTERS / f"{name}.toml")
        (apart, highest), (together, lowest) = (
            gain(work, cluster, ranks, length * K, hidden) for hidden in (False, True)
        )
        labels: dict[str, str | int] = {
            "cluster": cluster.name,
            "run": f"{work}, {ranks} GPUs",
            "ktokens": length,
        }
        theirs = {"team": BEST.get(name), "gain_percent": STATED.get((name, ranks))}
        ours = {
            "team": apart,
            "gain_percent": highest,
            "team_hidden": together,
            "gain_hidden_percent": lowest,
        }
        yield Row(labels, theirs, ours, cluster.name)


LINK_RATE, LINK_TOKENS = "100mbit", 8192
"""The rate of the link or of each rail; tokens of a step."""
LINK_SETTINGS = [
    (link, model, length) for link in LINKS for model in ("dit", "gpt") for length in (1024, 2048)
]
RING = {"dit": "ring", "gpt": "zigzag"}
"""Ring Attention as it is fastest: a causal mask's work is balanced."""
TEAMS = ("wallfacer_c2", "wallfacer_c2_p2p_intra")
"""Teams of 2, the only size of 8 ranks besides 1; both placements, of which the faster counts."""
WARM_UP, STEPS = 1, 4
"""Steps that do not count, and that do."""
HEADS_SEEN, LENGTHS_SEEN = AttentionShape(num_heads=8, head_dim=16, batch=4), (128, 512)
"""Shape that the calibration measures: the models' heads, at lengths of a rank."""


def link_gains(measured: bool = False) -> Iterator[Row]:
    """Yield the gains predicted by ``bench/link``'s cluster files, or by a calibration of each link
    and measured.

    Raises NetworkError: the machine does not allow the namespaces; MeasureError: a rank failed.
    """
    if not measured:
        for link, model, length in LINK_SETTINGS:
            flags = _link_flags(model, length, Path("nowhere"))
            yield _link_row(
                link,
                model,
                length,
                _link_seconds(load_cluster(LINK_CLUSTERS / f"{link}.toml"), flags),
            )
        return
    prepare_machine()
    with corpus() as text:
        for kind in LINKS:
            with Network(rails=kind == "rails") as network:
                network.limit(LINK_RATE)
                figures = calibrated(network, HEADS_SEEN, LENGTHS_SEEN)
                cluster = Cluster(
                    name=kind, device="cpu", **{key: value for key, (value, _) in figures.items()}
                )
                for link, model, length in LINK_SETTINGS:
                    if link != kind:
                        continue
                    flags = _link_flags(model, length, data_of(model, text, length))
                    trained = {
                        name: _trained_on_link(network, model, line) for name, line in flags.items()
                    }
                    row = _link_row(link, model, length, _link_seconds(cluster, flags), trained)
                    print(
                        f"{link} {model} {length}: {row.measured}, predicted {row.analytic}",
                        file=sys.stderr,
                    )
                    yield row


def _link_flags(model: str, length: int, data: Path) -> dict[str, list[str]]:
    """Return the flags of the entry by method."""
    cases, batch = cases_of(model), LINK_TOKENS // length
    shape = {"seq_length": length, "batch": batch, "iterations": WARM_UP + STEPS}
    return {name: command_line(model, cases[name], data, **shape) for name in (RING[model], *TEAMS)}


def _link_seconds(cluster: Cluster, flags: dict[str, list[str]]) -> dict[str, float]:
    """Return the predicted seconds of a step by method."""
    seconds = {}
    for name, line in flags.items():
        latents = "--latent-shape" in line
        config = (
            diffusion.parse_args(line) if latents else with_vocabulary(parse_args(line), VOCAB_SIZE)
        )
        seconds[name] = float(predicted(config, LINK_RANKS, cluster).time)
    return seconds


def _trained_on_link(network: Network, model: str, flags: list[str]) -> float:
    """Train by a method; return the median seconds of a step."""
    steps = train(network, flags, lambda iteration: None, f"pretrain_{model}")
    return median(step.seconds for step in steps[WARM_UP:])


def _link_row(
    link: str,
    model: str,
    length: int,
    expected: dict[str, float],
    trained: dict[str, float] | None = None,
) -> Row:
    def gain_of(seconds: dict[str, float]) -> dict[str, float]:
        ring, ours = seconds[RING[model]], min(seconds[name] for name in TEAMS)
        shown = {"ring_s": ring, "wallfacer_s": ours, "times_as_fast": ring / ours}
        return {name: round(float(value), 3) for name, value in shown.items()}

    labels: dict[str, str | int] = {"link": link, "model": model, "tokens": length}
    where = f"{device_name('cpu') if trained else 'emulated'}, 2 nodes of 4 processes, {LINK_RATE}"
    return Row(labels, {}, gain_of(expected), where, trained and gain_of(trained))


def supported() -> Iterator[Row]:
    """Yield whether lengths fit 8 A100 of 80 GB, in bfloat16 with ZeRO-2 and checkpoints behind the
    attention.
    """
    arranged = Arrangement(
        strategy="zero2", recompute="attention_boundary", loss_chunk=2048, ffn_chunk=2048
    )
    for row in rows.published("wallfacer_supported_length"):
        work, length, need = (
            replace(ring.model(row["model"]), element_size=2),
            int(row["ktokens"]),
            {},
        )
        for way, team in (("ring_attention", 1), ("wallfacer", 2)):
            plan = make_plan("wallfacer", seq_len=length * K, size=8, team_size=team)
            need[way] = sum(memory_of(work, plan, arranged).values()) / 1e9
        ours = {way: "yes" if size <= 80 else "no" for way, size in need.items()}
        ours |= {f"{way}_gb": f"{size:.1f}" for way, size in need.items()}
        labels: dict[str, str | int] = {"model": row["model"], "ktokens": length}
        yield Row(labels, {way: row[way] for way in need}, ours, "8 A100")


TABLES: rows.Makers = {
    "volumes": volumes,
    "memory": memory,
    "gains": gains,
    "links": link_gains,
    "supported_length": supported,
}
main = partial(rows.main, "wallfacer", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
