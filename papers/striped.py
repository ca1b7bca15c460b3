"""Striped Attention (Brandon et al. 2023, arXiv:2311.09431): its speed-ups over Ring Attention, all
137 rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from papers import rows
from papers.ring import device, step_of
from papers.rows import Row
from parallel.context import make_plan
from planner.cluster import Cluster
from planner.step_cost import predict
from planner.step_shape import Arrangement, StepShape
from tools.common.arguments import run_command

TILES = {"A100": (2048, 4096), "TPU": (2048, 2048)}
"""Queries and keys of the tiles that are computed whole, or not at all (section 3.2)."""
CHIPS = {"A100-80GB x8": "A100 NVLink", "TPUv3 x8": "TPU v3", "TPUv4 x16": "TPU v4"}


def model(size: str) -> StepShape:
    """Return the work of a step of the paper's model ``1B``, ``3B`` or ``7B`` (table 1)."""
    return step_of(f"striped_{size.lower()}")


def speedup(work: StepShape, ranks: int, block: int, double: bool, computed: float = 0.5) -> float:
    """Return the time of Ring over that of Striped Attention on blocks of so many tokens, if all
    sending is hidden.

    ``double``: attention's operations take twice as long as others (TF32 beside bfloat16, on the
    A100). ``computed`` is the share of a causal block that is computed; half gives the theoretical
    maximum.
    """
    linear = (
        2 * (4 * work.hidden**2 + 2 * work.hidden * work.ffn)
        + 2 * work.hidden * work.vocab / work.layers
    )
    pair = 4 * work.hidden * (2 if double else 1)
    ring, striped = (ranks - 1 + computed) * block, ranks * computed * block
    return (linear + pair * ring) / (linear + pair * striped)


def computed_share(block: int, tile: tuple[int, int]) -> float:
    """Return the share of a causal block in tiles that have at least one visible pair."""
    queries, keys = tile
    seen = sum(
        min(-(-(start + queries) // keys) * keys, block) for start in range(0, block, queries)
    )
    return seen * queries / block**2


def planned(work: StepShape, cluster: Cluster, tp: int, ranks: int, tokens: int) -> float:
    """Return the planner's speed-up of a step: exact causal work, sends overlapped round by round,
    recomputed.
    """
    times = {}
    for method in ("ring", "striped"):
        plan = make_plan(method, seq_len=tokens, size=ranks, multiple=tp)
        times[method] = predict(work, plan, Arrangement(tp=tp, recompute="full"), cluster).time
    return float(times["ring"] / times["striped"])


def speedups() -> Iterator[Row]:
    """Yield the paper's rows with what its formula, its tiles and the planner say."""
    for row in rows.published("striped_speedups"):
        work, on_gpu = model(row["model"]), row["hardware"].startswith("A100")
        tp, ranks, tokens = (
            int(row[name]) for name in ("model_parallel", "sequence_parallel", "seq_len")
        )
        block = tokens // ranks
        cluster = device(CHIPS[row["hardware"]])
        fraction = cluster.matmul_fraction / (2 if on_gpu else 1)
        share = computed_share(block, TILES["A100" if on_gpu else "TPU"])
        highest, tiled = (speedup(work, ranks, block, on_gpu, part) for part in (0.5, share))
        plan = planned(work, replace(cluster, attention_fraction=fraction), tp, ranks, tokens)
        labels: dict[str, str | int] = {
            "hardware": row["hardware"],
            "mesh": f"{row['model']} {tp} x {ranks}",
        }
        theirs = {
            "theoretical_max": row["theoretical_max_speedup"],
            "speedup": row["measured_speedup"],
        }
        ours = {
            "theoretical_max": round(highest, 2),
            "speedup": round(tiled, 3),
            "by_the_planner": round(plan, 3),
        }
        published = {name: float(x) for name, x in theirs.items()}
        yield Row(labels | {"seq_len": tokens}, published, ours, row["hardware"])


TABLES: rows.Makers = {
    "speedups": speedups,
}
main = partial(rows.main, "striped", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
