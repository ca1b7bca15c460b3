"""Records: published end-to-end runs, and the longest sequences on one node (UPipe,
arXiv:2602.21196).
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import median
from typing import Any

from model.registry import num_parameters
from papers import rows
from papers.ring import K, step_of
from papers.rows import Figures, Row
from parallel.context import make_plan
from planner.cluster import CLUSTERS, load_cluster
from planner.host_memory import offloaded
from planner.levers import FFN_CHUNK, LOSS_CHUNK
from planner.search import predicted
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from tools.common.arguments import run_command
from train.config.language import parse_args

FITTED, HELD_OUT, APART = "fitted", "held out", "apart"
"""Halves of the table, and rows that this model has no business with; their notes say why."""
HOST_ADAM = 1.8e-9
"""Seconds per parameter of a rank that DeepSpeed's Adam takes on the host, where a row's beside is
``cpu adam``.
"""
COMPUTED_AGAIN = 0.5
"""Share of a layer's products that torchtitan's selective recomputation runs again, where it is
``per op``.
"""
STAGES = 4
"""A rank of 8 has 4 of Llama 3's 32 query heads; in a stage, one."""
LEANEST = Arrangement(recompute="full", offload=True, loss_chunk=LOSS_CHUNK, ffn_chunk=FFN_CHUNK)
"""Layers computed again from inputs that lie in host memory, as the paper's runs do; all weights
are sharded.
"""
CLUSTER = load_cluster(CLUSTERS / "h100_pod.toml")


def gb(work: StepShape, gpus: int, tokens: int, stages: int) -> float:
    """Return a GPU's predicted peak in 10^9 bytes, of Ulysses whose heads are exchanged in so many
    stages.
    """
    plan = make_plan("ulysses", seq_len=tokens, size=gpus, ulysses_head_chunks=stages)
    return sum(memory_of(work, plan, LEANEST).values()) / 1e9


def supported() -> list[Row]:
    """Return whether each length fits a GPU, with its predicted memory."""
    made = []
    for row in rows.published("records"):
        work, gpus, tokens = step_of(row["model"]), int(row["gpus"]), int(row["ktokens"]) * K
        plan = make_plan("ulysses", seq_len=tokens, size=gpus)
        ways = {"upipe_gb": gb(work, gpus, tokens, STAGES), "ulysses_gb": gb(work, gpus, tokens, 1)}
        ours: Figures = {
            "supported": "yes" if min(ways.values()) <= CLUSTER.memory_gb else "no",
            **{name: round(size, 1) for name, size in ways.items()},
            "host_gb": round(offloaded(work, plan, LEANEST) / 1e9, 1),
        }
        labels: dict[str, str | int] = {
            "record": row["record"],
            "model": row["model"],
            "ktokens": int(row["ktokens"]),
        }
        made.append(
            Row(labels, {"supported": row["supported"]}, ours, f"{gpus} {row['gpu']} of 80 GB")
        )
    return made


def prediction(row: dict[str, str]) -> tuple[float, float]:
    """Return the predicted seconds of a step and 10^9 bytes of a GPU of a row of
    tables/public_runs.csv.
    """
    flags_of_model = next(
        one["flags"] for one in rows.published("public_models") if one["model"] == row["model"]
    )
    gpus, flags = int(row["gpus"]), f"{flags_of_model} {row['flags']} --seq-length {row['tokens']}"
    config: Any = parse_args([*flags.split(), "--bf16", "--mock-data", "--device", "cpu"])
    cluster = load_cluster(CLUSTERS / f"{row['cluster']}.toml").running(row["kernel"])
    outcome = predicted(config, gpus, cluster)
    seconds = outcome.time
    if row["beside"] == "cpu adam":
        seconds += HOST_ADAM * num_parameters(config.model) / gpus
    if row["beside"] == "per op":
        boundary = config.updated(recompute_granularity="attention_boundary")
        seconds += COMPUTED_AGAIN * predicted(boundary, gpus, cluster).seconds["recompute"]
    return float(seconds), outcome.bytes / 1e9


@lru_cache
def runs() -> tuple[Row, ...]:
    """Return every row with its prediction."""
    made = []
    for row in rows.published("public_runs"):
        seconds, gb = prediction(row)
        labels: dict[str, str | int] = {"half": row["half"], "source": row["source"].split("/")[2]}
        labels |= {name: row[name] for name in ("cluster", "kernel", "model")}
        labels |= {"gpus": int(row["gpus"]), "tokens": int(row["tokens"])}
        theirs = {"seconds": float(row["seconds"])} | (
            {"gb": float(row["gb"])} if row["gb"] else {}
        )
        made.append(
            Row(labels, theirs, {"seconds": float(f"{seconds:.4g}"), "gb": round(gb, 1)}, "any")
        )
    return tuple(made)


def errors(made: Sequence[Row], half: str, **of: str) -> list[float]:
    """Return how far predicted seconds are off on the rows of a half, of all or ``of`` one cluster
    and kernel.
    """
    wanted = {"half": half, **of}.items()
    return [abs(row.difference["seconds"]) for row in made if wanted <= row.of.items()]


def summary(made: Sequence[Row]) -> str:
    """Say how far off both halves are."""
    halves = ((half, errors(made, half)) for half in (HELD_OUT, FITTED))
    halves_told = [
        f"{half}: {len(off)} rows, median {median(off):.1%}, at most {max(off):.1%}"
        for half, off in halves
        if off
    ]
    return "; ".join(halves_told)


TABLES: rows.Makers = {
    "public": runs,
    "upipe": supported,
}
main = partial(rows.main, "records", TABLES, __doc__, public=summary)

if __name__ == "__main__":
    run_command(main)
