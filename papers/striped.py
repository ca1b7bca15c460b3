"""Striped Attention (Brandon et al. 2023, arXiv:2311.09431): its speed-ups over Ring Attention, all 137 rows."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from kernels.operators import linear
from papers import rows
from papers.emulate import clock, emulate
from papers.jobs import Figures, Job, Runs, shown
from papers.ring import device, step_of
from papers.rows import Row
from parallel.context import make_plan
from parallel.context.traffic import sizes
from planner.cluster import Cluster
from planner.step_cost import predict
from planner.step_memory import Arrangement, StepShape
from runtime.machine import device_name
from tools.common.arguments import run_command

TILES = {"A100": (2048, 4096), "TPU": (2048, 2048)}
"""Queries and keys of the tiles that are computed whole, or not at all (section 3.2)."""
SCALE, HEADS, REPEATS = 16, 2, 3
"""Divisor of rows to measure them on a CPU, heads then, and calls of which the median counts."""
CHIPS = {"A100-80GB x8": "A100 NVLink", "TPUv3 x8": "TPU v3", "TPUv4 x16": "TPU v4"}


def model(size: str) -> StepShape:
    """Return the work of a step of the paper's model ``1B``, ``3B`` or ``7B`` (table 1)."""
    return step_of(f"striped_{size.lower()}")


def speedup(work: StepShape, ranks: int, block: int, double: bool, computed: float = 0.5) -> float:
    """Return the time of Ring over that of Striped Attention on blocks of so many tokens, if all sending is hidden.

    ``double``: attention's operations take twice as long as others (TF32 beside bfloat16, on the A100). ``computed`` is
    the share of a causal block that is computed; half gives the theoretical maximum.
    """
    linear = 2 * (4 * work.hidden**2 + 2 * work.hidden * work.ffn) + 2 * work.hidden * work.vocab / work.layers
    pair = 4 * work.hidden * (2 if double else 1)
    ring, striped = (ranks - 1 + computed) * block, ranks * computed * block
    return (linear + pair * ring) / (linear + pair * striped)


def computed_share(block: int, tile: tuple[int, int]) -> float:
    """Return the share of a causal block in tiles that have at least one visible pair."""
    queries, keys = tile
    seen = sum(min(-(-(start + queries) // keys) * keys, block) for start in range(0, block, queries))
    return seen * queries / block**2


def planned(work: StepShape, cluster: Cluster, tp: int, ranks: int, tokens: int) -> float:
    """Return the planner's speed-up of a step: exact causal work, sends overlapped round by round, recomputed."""
    times = {}
    for method in ("ring", "striped"):
        plan = make_plan(method, seq_len=tokens, size=ranks, multiple=tp)
        times[method] = predict(work, plan, Arrangement(tp=tp, recompute="full"), cluster).time
    return float(times["ring"] / times["striped"])


def job(size: str, tp: int, ranks: int, tokens: int) -> Job:
    """Return what measures a row: a run with Ring and one with Striped Attention, all layers computed again."""
    return Job(
        gpus=tp * ranks,
        config=f"striped_{size.lower()}",
        flags=f"--tensor-model-parallel-size {tp} --context-parallel-size {ranks} --seq-length {tokens} "
        "--recompute-granularity full",
        cases={
            "ring": "--context-parallel-method ring --context-parallel-layout contiguous",
            "striped": "--context-parallel-method striped",
        },
        figures=_compared,
    )


def _compared(runs: Runs) -> Figures:
    ring, striped = (runs[name].tokens_per_s for name in ("ring", "striped"))
    found: Figures = {"speedup": round(striped / ring, 3) if ring and striped else "OOM"}
    return {**found, "ring_tokens_per_s": shown(ring), "striped_tokens_per_s": shown(striped)}


def emulated(size: str, ranks: int, tokens: int) -> Figures:
    """Return a row's speed-up by the work of each rank, done here one after the other, with all sends hidden.

    Widths, vocabulary and length are those of the row divided by ``SCALE``, which leaves attention its share of a
    layer; as on the paper's ranks, the forward is done again in the backward.
    """
    work, timer = model(size), clock("cpu", REPEATS)
    width, ffn, vocab = (wide // SCALE for wide in (work.hidden, work.ffn, work.vocab))
    # Two products of a feed-forward, as in the paper's formula; its LLaMA has three.
    shapes = [(width, width, 4), (width, ffn, 1), (ffn, width, 1), (width, vocab, 1 / work.layers)]
    layer = 0.0
    for inside, outside, count in shapes:
        x = torch.randn(tokens // SCALE // ranks, inside, requires_grad=True)
        weight, grad = torch.randn(outside, inside, requires_grad=True), torch.randn(len(x), outside)

        def product(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
            linear(x, weight)
            torch.autograd.grad(linear(x, weight), (x, weight), grad)

        layer += count * timer(product, ())
    times = {}
    for method in ("ring", "striped"):
        plan = make_plan(method, seq_len=tokens // SCALE, size=ranks)
        of = sizes(plan.geometry, 1, HEADS, HEADS, width // HEADS, 4)
        busy = emulate(plan, of, "cpu", torch.float32, timer)
        rounds = {moves: float(seconds.max(axis=1).sum()) for moves, seconds in busy.items()}
        times[method] = layer + sum((1 + (moves is None)) * seconds for moves, seconds in rounds.items())
    return {"emulated_speedup": round(times["ring"] / times["striped"], 3), "emulated_on": device_name("cpu")}


def speedups(measured: bool = False) -> Iterator[Row]:
    """Yield the paper's rows with what its formula, its tiles and the planner say, and what emulated ranks take."""
    here = cache(emulated)
    for row in rows.published("striped_speedups"):
        work, on_gpu = model(row["model"]), row["hardware"].startswith("A100")
        tp, ranks, tokens = (int(row[name]) for name in ("model_parallel", "sequence_parallel", "seq_len"))
        block = tokens // ranks
        cluster = device(CHIPS[row["hardware"]])
        fraction = cluster.matmul_fraction / (2 if on_gpu else 1)
        share = computed_share(block, TILES["A100" if on_gpu else "TPU"])
        most, tiled = (speedup(work, ranks, block, on_gpu, part) for part in (0.5, share))
        plan = planned(work, replace(cluster, attention_fraction=fraction), tp, ranks, tokens)
        of: dict[str, str | int] = {"hardware": row["hardware"], "mesh": f"{row['model']} {tp} x {ranks}"}
        theirs = {"theoretical_max": row["theoretical_max_speedup"], "speedup": row["measured_speedup"]}
        ours = {"theoretical_max": round(most, 2), "speedup": round(tiled, 3), "by_the_planner": round(plan, 3)}
        published = {name: float(x) for name, x in theirs.items()}
        measures = job(row["model"], tp, ranks, tokens) if on_gpu else None
        taken = here(row["model"], ranks, tokens) if measured else None
        yield Row(of | {"seq_len": tokens}, published, ours, row["hardware"], taken, job=measures)


TABLES: rows.Makers = {
    "speedups": speedups,
}
main = partial(rows.main, "striped", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
