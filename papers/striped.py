"""Striped Attention (Brandon et al. 2023, arXiv:2311.09431): its speed-ups over Ring Attention.

Each of the 137 rows has three predictions: by the paper's formula, by the formula if tiles are only
computed whole, and by the planner.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from papers import rows
from papers.ring import device, step_of
from papers.table import TableRow
from parallel.context import make_plan
from planner.cluster import Cluster
from planner.step_cost import predict
from planner.step_shape import Arrangement, StepShape
from tools.common.arguments import run_command

TILES = {"A100": (2048, 4096), "TPU": (2048, 2048)}
"""Numbers of queries and keys per tile, keyed by device; a tile is computed whole or not at all
(section 3.2)."""
FITTED = "fitted"
"""Label, in the column ``half``, of the rows to which constants may be fitted."""
HELD_OUT = "held out"
"""Label of the rows that only test predictions: no constant is fitted to them."""
CHIPS = {"A100-80GB x8": "A100 NVLink", "TPUv3 x8": "TPU v3", "TPUv4 x16": "TPU v4"}


def model(size: str) -> StepShape:
    """Return the work of a step of the paper's model ``1B``, ``3B`` or ``7B`` (table 1)."""
    return step_of(f"striped_{size.lower()}")


def speedup(work: StepShape, ranks: int, block: int, double: bool, computed: float = 0.5) -> float:
    """Return the ratio of Ring Attention's time to Striped Attention's, if all sends are hidden.

    Ring Attention computes all blocks in full, except for a causal one. Striped Attention computes
    only the causal share of every block.

    Args:
        block: number of tokens per rank.
        double: True if attention's operations take twice as long as others (on the A100, they are
            in TF32, and the others in bfloat16).
        computed: share of a causal block that is computed; half gives the theoretical maximum.
    """
    layer = 2 * (4 * work.hidden**2 + 2 * work.hidden * work.ffn)
    linear = layer + 2 * work.hidden * work.vocab / work.layers
    pair = 4 * work.hidden * (2 if double else 1)
    ring = (ranks - 1 + computed) * block
    striped = ranks * computed * block
    return (linear + pair * ring) / (linear + pair * striped)


def computed_share(block: int, tile: tuple[int, int]) -> float:
    """Return the share of a causal block that is computed: tiles with at least one visible pair."""
    tile_queries, tile_keys = tile
    keys = 0
    for start in range(0, block, tile_queries):
        visible = start + tile_queries
        keys += min(-(-visible // tile_keys) * tile_keys, block)
    return keys * tile_queries / block**2


def planned(work: StepShape, cluster: Cluster, tp: int, ranks: int, tokens: int) -> float:
    """Return a step's speed-up over Ring Attention as the planner predicts it.

    The planner counts exact causal work, sends that overlap round by round, and recomputation.
    """
    times = {}
    for method in ("ring", "striped"):
        plan = make_plan(method, seq_len=tokens, size=ranks, multiple=tp)
        times[method] = predict(work, plan, Arrangement(tp=tp, recompute="full"), cluster).time
    return float(times["ring"] / times["striped"])


def halves(table: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the half of every row: of a device's rows, in the table's order, each second one.

    A device's first row is fitted, its second held out, and so on in turns. The meshes of the
    table have odd and even numbers of lengths, so each half has the shortest lengths of some.

    Args:
        table: rows of tables/striped_speedups.csv.
    """
    counts: Counter[str] = Counter()
    labels = []
    for row in table:
        labels.append((FITTED, HELD_OUT)[counts[row["hardware"]] % 2])
        counts[row["hardware"]] += 1
    return labels


def speedups() -> Iterator[TableRow]:
    """Yield the paper's rows with the predictions of its formula, its tiles and the planner."""
    table = rows.published("striped_speedups")
    for row, half in zip(table, halves(table), strict=True):
        work = model(row["model"])
        on_gpu = row["hardware"].startswith("A100")
        tp = int(row["model_parallel"])
        ranks = int(row["sequence_parallel"])
        tokens = int(row["seq_len"])

        block = tokens // ranks
        cluster = device(CHIPS[row["hardware"]])
        fraction = cluster.matmul_fraction / (2 if on_gpu else 1)
        share = computed_share(block, TILES["A100" if on_gpu else "TPU"])
        plan = planned(work, replace(cluster, attention_fraction=fraction), tp, ranks, tokens)

        labels: dict[str, str | int] = {
            "half": half,
            "hardware": row["hardware"],
            "mesh": f"{row['model']} {tp} x {ranks}",
            "seq_len": tokens,
        }
        published = {
            "theoretical_max": float(row["theoretical_max_speedup"]),
            "speedup": float(row["measured_speedup"]),
        }
        predictions = {
            "theoretical_max": round(speedup(work, ranks, block, on_gpu), 2),
            "speedup": round(speedup(work, ranks, block, on_gpu, share), 3),
            "by_the_planner": round(plan, 3),
        }
        yield TableRow(labels, published, predictions, row["hardware"])


TABLES: rows.TableFunctions = {
    "speedups": speedups,
}
main = partial(rows.main, "striped", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
