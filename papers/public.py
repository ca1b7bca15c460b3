"""Published end-to-end runs beside the planner's predictions: rows that constants are fitted to, and others."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

from model.registry import num_parameters
from papers import rows
from papers.rows import Row
from planner.cluster import CLUSTERS, load_cluster
from planner.search import predicted
from train.config.language import parse_args

FITTED, HELD_OUT, APART = "fitted", "held out", "apart"
"""Halves of the table, and rows that this model has no business with; their notes say why."""
HOST_ADAM = 1.8e-9
"""Seconds per parameter of a rank that DeepSpeed's Adam takes on the host, where a row's beside is ``cpu adam``."""
COMPUTED_AGAIN = 0.5
"""Share of a layer's products that torchtitan's selective recomputation runs again, where it is ``per op``."""


@lru_cache
def _flags(model: str) -> str:
    return next(row["flags"] for row in rows.published("public_models") if row["model"] == model)


def prediction(row: dict[str, str]) -> tuple[float, float]:
    """Return the predicted seconds of a step and 10^9 bytes of a GPU of a row of tables/public_runs.csv."""
    gpus, flags = int(row["gpus"]), f"{_flags(row['model'])} {row['flags']} --seq-length {row['tokens']}"
    config: Any = parse_args([*flags.split(), "--bf16", "--mock-data", "--device", "cpu"])
    cluster = load_cluster(CLUSTERS / f"{row['cluster']}.toml").running(row["kernel"])
    found = predicted(config, gpus, cluster)
    seconds = found.time
    if row["beside"] == "cpu adam":
        seconds += HOST_ADAM * num_parameters(config.model) / gpus
    if row["beside"] == "per op":
        boundary = replace(config, recompute=replace(config.recompute, recompute_granularity="attention_boundary"))
        seconds += COMPUTED_AGAIN * predicted(boundary, gpus, cluster).seconds["recompute"]
    return float(seconds), found.bytes / 1e9


@lru_cache
def runs() -> tuple[Row, ...]:
    """Return every row with its prediction."""
    found = []
    for row in rows.published("public_runs"):
        seconds, gb = prediction(row)
        of: dict[str, str | int] = {"half": row["half"], "source": row["source"].split("/")[2]}
        of |= {name: row[name] for name in ("cluster", "kernel", "model")}
        of |= {"gpus": int(row["gpus"]), "tokens": int(row["tokens"])}
        theirs = {"seconds": float(row["seconds"])} | ({"gb": float(row["gb"])} if row["gb"] else {})
        found.append(Row(of, theirs, {"seconds": float(f"{seconds:.4g}"), "gb": round(gb, 1)}, "any"))
    return tuple(found)


def errors(found: Sequence[Row], half: str, **of: str) -> list[float]:
    """Return how far predicted seconds are off on the rows of a half, of all or ``of`` one cluster and kernel."""
    wanted = {"half": half, **of}.items()
    return [abs(row.difference["seconds"]) for row in found if wanted <= row.of.items()]


def summary(found: Sequence[Row]) -> str:
    """Say how far off both halves are."""
    halves = ((half, errors(found, half)) for half in (HELD_OUT, FITTED))
    said = [f"{half}: {len(off)} rows, median {median(off):.1%}, at most {max(off):.1%}" for half, off in halves if off]
    return "; ".join(said)
