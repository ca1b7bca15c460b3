"""Striped Attention (Brandon et al. 2023, arXiv:2311.09431): its speed-ups over Ring Attention.

Each of the 137 rows has four predictions: by the paper's formula, by the formula if tiles are only
computed whole, and by the planner for two programs. The first computes exact causal work, as this
project's kernels do; the second is the paper's, which computes tiles whole.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log
from statistics import fmean

from papers import rows
from papers.ring import device, step_of
from papers.table import Figures, TableRow
from parallel.context import make_plan
from planner.cluster import Cluster
from planner.step_cost import predict
from planner.step_shape import Arrangement, StepShape
from tools.common.arguments import run_command

TILES = {"A100": (2048, 4096), "TPU": (2048, 2048)}
"""Numbers of queries and keys per tile, keyed by device; a tile is computed whole or not at all
(section 3.2)."""
EXACT = "by_the_planner"
"""Figure of the planner for a kernel that computes exact causal work."""
TILED = "by_the_planner_with_tiles"
"""Figure of the planner for a kernel that computes the paper's tiles whole; nothing is fitted."""
MASKED = "by_the_planner_with_tiles_and_masks"
"""The same if tiles with a mask take additional time, ``MASK_OVERHEAD``."""
FITTED = "fitted"
"""Label, in the column ``half``, of the rows to which constants may be fitted."""
HELD_OUT = "held out"
"""Label of the rows that only test predictions: no constant is fitted to them."""
MASK_OVERHEAD = {"A100-80GB x8": 0.169, "TPUv3 x8": 0.0, "TPUv4 x16": 0.191}
"""Additional time of a tile with a mask, as a share of its computed pairs' time, keyed by hardware.

Fitted to the first half of each device's rows by ``misfit``.
"""
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

    The planner counts the pairs that the cluster's kernel computes, sends that overlap round by
    round, and recomputation.
    """
    times = {}
    for method in ("ring", "striped"):
        plan = make_plan(method, seq_len=tokens, size=ranks, multiple=tp)
        times[method] = predict(work, plan, Arrangement(tp=tp, recompute="full"), cluster).time
    return float(times["ring"] / times["striped"])


def exact_kernel(hardware: str) -> Cluster:
    """Return a device whose kernel computes exact causal work, at the paper's rate of attention.

    On the A100 attention's operations take twice as long as others (section 4).
    """
    cluster = device(CHIPS[hardware])
    share = 0.5 if hardware.startswith("A100") else 1.0
    return replace(cluster, attention_fraction=share * cluster.matmul_fraction)


def tiled_kernel(hardware: str, mask_overhead: float | None = None) -> Cluster:
    """Return a device with the paper's kernel: whole tiles, and additional time for masked ones.

    Args:
        mask_overhead: by default the fitted one.
    """
    overhead = MASK_OVERHEAD[hardware] if mask_overhead is None else mask_overhead
    queries, keys = TILES["A100" if hardware.startswith("A100") else "TPU"]
    cluster = exact_kernel(hardware)
    return replace(cluster, block_queries=queries, block_keys=keys, mask_overhead=overhead)


def predicted(row: Mapping[str, str], cluster: Cluster) -> float:
    """Return the planner's speed-up for a row of tables/striped_speedups.csv."""
    tp = int(row["model_parallel"])
    ranks = int(row["sequence_parallel"])
    return planned(model(row["model"]), cluster, tp, ranks, int(row["seq_len"]))


def misfit(hardware: str, mask_overhead: float) -> float:
    """Return the mean square of log(predicted / measured) over a device's fitted rows.

    ``MASK_OVERHEAD`` has the least of these, to three decimals. Held-out rows have no part in it.
    """
    table = rows.published("striped_speedups")
    cluster = tiled_kernel(hardware, mask_overhead)
    squares = []
    for row, half in zip(table, halves(table), strict=True):
        if half == FITTED and row["hardware"] == hardware:
            ratio = predicted(row, cluster) / float(row["measured_speedup"])
            squares.append(log(ratio) ** 2)
    return sum(squares) / len(squares)


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
        hardware = row["hardware"]
        work = model(row["model"])
        on_gpu = hardware.startswith("A100")
        ranks = int(row["sequence_parallel"])
        tokens = int(row["seq_len"])

        block = tokens // ranks
        share = computed_share(block, TILES["A100" if on_gpu else "TPU"])
        labels: dict[str, str | int] = {
            "half": half,
            "hardware": hardware,
            "mesh": f"{row['model']} {row['model_parallel']} x {ranks}",
            "seq_len": tokens,
        }
        published = {
            "theoretical_max": float(row["theoretical_max_speedup"]),
            "speedup": float(row["measured_speedup"]),
        }
        predictions = {
            "theoretical_max": round(speedup(work, ranks, block, on_gpu), 2),
            "speedup": round(speedup(work, ranks, block, on_gpu, share), 3),
            EXACT: round(predicted(row, exact_kernel(hardware)), 3),
            TILED: round(predicted(row, tiled_kernel(hardware, 0.0)), 3),
            MASKED: round(predicted(row, tiled_kernel(hardware)), 3),
        }
        yield TableRow(labels, published, predictions, hardware)


def errors() -> Iterator[TableRow]:
    """Yield the planner's errors in percent: by device, by tokens per rank, and by mesh."""
    table = list(speedups())
    for hardware in CHIPS:
        groups: dict[tuple[str, int | str], list[TableRow]] = {("all", ""): []}
        by_length: dict[tuple[str, int | str], list[TableRow]] = defaultdict(list)
        by_mesh: dict[tuple[str, int | str], list[TableRow]] = defaultdict(list)
        for row in table:
            if row.hardware == hardware:
                mesh = str(row.labels["mesh"]).partition(" ")[2]
                ranks = int(mesh.rpartition(" ")[2])
                groups["all", ""].append(row)
                by_length["tokens per rank", int(row.labels["seq_len"]) // ranks].append(row)
                by_mesh["mesh", mesh].append(row)

        groups |= dict(sorted(by_length.items()))
        groups |= dict(sorted(by_mesh.items()))
        for (kind, value), members in groups.items():
            labels = {"hardware": hardware, "rows": kind, "value": value}
            yield TableRow(labels, {}, error_figures(members), hardware)


def error_figures(members: Sequence[TableRow]) -> dict[str, float | int | None]:
    """Return the errors of some rows in percent, and how many losses are called a gain.

    ``off`` is the mean error without signs; the largest error has its sign. They are None if no
    row of a half is among the members.
    """
    fitted = [row for row in members if row.labels["half"] == FITTED]
    held_out = [row for row in members if row.labels["half"] == HELD_OUT]
    figures: dict[str, float | int | None] = {"count": len(members)}
    for title, half, name in (
        ("exact", members, EXACT),
        ("tiles", members, TILED),
        ("masks_fitted", fitted, MASKED),
        ("masks_held_out", held_out, MASKED),
    ):
        percents = [percent_error(row, name) for row in half]
        figures[f"{title}_off"] = round(fmean(map(abs, percents)), 1) if percents else None
        figures[f"{title}_largest"] = max(percents, key=abs, default=None)

    losses = [row for row in members if figure(row.published, "speedup") < 1]
    figures["losses"] = len(losses)
    for title, name in (("exact", EXACT), ("tiles", TILED), ("masks", MASKED)):
        called_gains = [row for row in losses if figure(row.analytic, name) > 1]
        figures[f"{title}_losses_called_gains"] = len(called_gains)
    return figures


def figure(figures: Figures, name: str) -> float:
    """Return a figure that is a number."""
    value = figures[name]
    assert isinstance(value, float | int)
    return float(value)


def percent_error(row: TableRow, name: str) -> float:
    """Return the error in percent of a prediction of the measured speed-up."""
    ratio = figure(row.analytic, name) / figure(row.published, "speedup")
    return round(100 * (ratio - 1), 1)


def summary(table: Sequence[TableRow]) -> str:
    """Return the planner's errors on a device's rows, a line for each device."""
    lines = ["Mean error of the planner without signs, and the largest, in percent:"]
    for hardware in CHIPS:
        members = [row for row in table if row.hardware == hardware]
        figures = error_figures(members)
        lines.append(
            f"{hardware}: {figures['exact_off']}, {figures['exact_largest']:+} with exact causal "
            f"work; {figures['tiles_off']}, {figures['tiles_largest']:+} with the paper's tiles; "
            f"{figures['masks_held_out_off']}, {figures['masks_held_out_largest']:+} with a cost "
            "of masks, on rows held out"
        )
        if figures["losses"]:
            lines.append(
                f"  of {figures['losses']} measured losses, a gain is predicted for "
                f"{figures['exact_losses_called_gains']}, {figures['tiles_losses_called_gains']} "
                f"and {figures['masks_losses_called_gains']}"
            )
    return "\n".join(lines)


TABLES: rows.TableFunctions = {
    "speedups": speedups,
    "errors": errors,
}
main = partial(rows.main, "striped", TABLES, __doc__, speedups=summary)

if __name__ == "__main__":
    run_command(main)
