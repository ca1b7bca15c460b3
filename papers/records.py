"""Published end-to-end runs, and the longest sequences of UPipe, ALST and FPDT.

Each figure is compared with the planner's prediction.

The runs test the planner: its constants were fitted to one half of the table, and the other half is
only predicted. The configurations of each source, cluster and kernel go to the two halves in turn,
so that both have the same machines. Runs in float8 are a table of their own, divided by the same
rule: there each recipe of scales is apart, and all rows in bfloat16 are held out.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from statistics import median
from typing import Any

from model.registry import num_parameters
from papers import rows
from papers.ring import K, step_of
from papers.table import Figures, TableRow
from parallel.context import make_plan
from planner.cluster import CLUSTERS, Cluster, load_cluster
from planner.host_memory import offloaded, pinned
from planner.levers import FFN_CHUNK, LOSS_CHUNK
from planner.search import predicted
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from tools.common.arguments import run_command
from train.config.language import parse_args

FITTED = "fitted"
"""Label, in the column ``half``, of the rows to which the planner's constants were fitted."""
HELD_OUT = "held out"
"""Label of the rows that test the planner: no constant was fitted to them."""
APART = "apart"
"""Label of the rows that the planner's model does not cover; the column ``note`` says why."""
HOST_ADAM = 1.8e-9
"""Seconds that DeepSpeed's Adam on the host takes per parameter of a rank; added to rows with ``cpu
adam`` in the column ``beside``."""
COMPUTED_AGAIN = 0.5
"""Share of a layer's matmuls that torchtitan's selective recomputation repeats; applies to rows
with ``per op`` in the column ``beside``."""
CONTEXT_PARALLEL = "--context-parallel-size"
STAGES = 4
"""Number of stages in which UPipe exchanges heads: each of 8 ranks has 4 of Llama 3's 32 query
heads, and each stage exchanges one."""
LEANEST = Arrangement(recompute="full", offload=True, loss_chunk=LOSS_CHUNK, ffn_chunk=FFN_CHUNK)
"""Memory settings of UPipe's runs, for the planner: all weights are sharded, and layers are
recomputed from inputs in host memory. Those of ALST and FPDT also have the moments there."""


def gb(
    work: StepShape, gpus: int, tokens: int, stages: int, memory: Arrangement = LEANEST
) -> float:
    """Return a GPU's predicted peak memory in 10^9 bytes if heads are exchanged in ``stages``."""
    plan = make_plan("ulysses", seq_len=tokens, size=gpus, ulysses_head_chunks=stages)
    return sum(memory_of(work, plan, memory).values()) / 1e9


def supported() -> list[TableRow]:
    """Return the rows of the longest sequences: whether each fits a GPU, and predicted memory.

    UPipe exchanges heads in stages, so that fewer of them are in memory at a time. A length is
    predicted to be supported if it fits a GPU, either with stages or without. Host memory that a
    cluster file assumes is compared too, and named if it is too small.
    """
    table = []
    for row in rows.published("records"):
        work = step_of(row["model"])
        gpus = int(row["gpus"])
        tokens = int(row["ktokens"]) * K
        plan = make_plan("ulysses", seq_len=tokens, size=gpus)
        cluster = load_cluster(CLUSTERS / f"{row['cluster']}.toml")
        memory = replace(LEANEST, moments_on_host=row["moments"] == "host")

        ulysses = gb(work, gpus, tokens, 1, memory)
        upipe = None
        if row["record"] == "UPipe":
            upipe = gb(work, gpus, tokens, STAGES, memory)
        smallest = min(ulysses, upipe or ulysses)
        host = pinned(work, plan, memory) / 1e9
        predictions: Figures = {
            "supported": "yes" if smallest <= cluster.memory_gb else "no",
            "upipe_gb": upipe and round(upipe, 1),
            "ulysses_gb": round(ulysses, 1),
            "host_gb": round(offloaded(work, plan, memory) / 1e9, 1),
            "pinned_host_gb": round(host, 1),
            "too_small": too_small(cluster, smallest, host),
        }
        labels: dict[str, str | int] = {
            "record": row["record"],
            "model": row["model"],
            "gpus": gpus,
            "ktokens": int(row["ktokens"]),
            "moments": row["moments"],
        }
        hardware = f"{gpus} {row['gpu']} of {row['gpu_gb']} GB"
        table.append(TableRow(labels, {"supported": row["supported"]}, predictions, hardware))
    return table


def too_small(cluster: Cluster, gpu_gb: float, host_gb: float) -> str:
    """Return which memory of a cluster, with its size, is smaller than what a run takes.

    Host memory whose size the cluster file does not state is not compared.
    """
    sizes = []
    if gpu_gb > cluster.memory_gb:
        sizes.append(f"GPU {cluster.memory_gb:g}")
    if cluster.host_memory_gb and host_gb > cluster.host_memory_gb:
        sizes.append(f"host {cluster.host_memory_gb:g}")
    return " and ".join(sizes)


def prediction(row: dict[str, str]) -> tuple[float, float]:
    """Return a step's predicted seconds, and a GPU's predicted memory in 10^9 bytes.

    The planner does not model DeepSpeed's Adam on the host, nor torchtitan's selective
    recomputation. If the column ``beside`` names one of them, its time is added here.

    Args:
        row: a row of tables/public_runs.csv.
    """
    models = {entry["model"]: entry["flags"] for entry in rows.published("public_models")}
    gpus = int(row["gpus"])
    flags = f"{models[row['model']]} {row['flags']} --seq-length {row['tokens']}"
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
def runs(name: str = "public_runs") -> tuple[TableRow, ...]:
    """Return every row of a table of published runs with its prediction."""
    table = []
    for row in rows.published(name):
        labels: dict[str, str | int] = {
            "half": row["half"],
            "source": row["source"].split("/")[2],
            "cluster": row["cluster"],
            "kernel": row["kernel"],
            "model": row["model"],
            "gpus": int(row["gpus"]),
            "tokens": int(row["tokens"]),
        }
        figures = {"seconds": float(row["seconds"])}
        if row["gb"]:  # not every source states the memory
            figures["gb"] = float(row["gb"])

        seconds, memory = prediction(row)
        predictions = {"seconds": float(f"{seconds:.4g}"), "gb": round(memory, 1)}
        table.append(TableRow(labels, figures, predictions, "any"))
    return tuple(table)


def float8_runs() -> list[TableRow]:
    """Return every row of tables/float8_runs.csv with its prediction, recipe and cp."""
    table = []
    for row, run in zip(rows.published("float8_runs"), runs("float8_runs"), strict=True):
        words = row["flags"].split()
        matmuls = "bfloat16"
        if "--fp8-format" in words:
            matmuls = "rowwise" if "--fp8-recipe" in words else "tensorwise"
        cp = 1
        if CONTEXT_PARALLEL in words:
            cp = int(words[words.index(CONTEXT_PARALLEL) + 1])
        table.append(replace(run, labels={**run.labels, "matmuls": matmuls, "cp": cp}))
    return table


def errors(table: Sequence[TableRow], half: str, **labels: str) -> list[float]:
    """Return the absolute relative errors of the predicted step times in a half of the table.

    Args:
        labels: labels that the rows must have, such as a cluster and a kernel.
    """
    selected = {"half": half, **labels}.items()
    return [abs(row.difference["seconds"]) for row in table if selected <= row.labels.items()]


def summary(table: Sequence[TableRow]) -> str:
    """Return a line with the median and the largest error of each half."""
    sentences = []
    for half in (HELD_OUT, FITTED):
        half_errors = errors(table, half)
        if half_errors:
            sentences.append(
                f"{half}: {len(half_errors)} rows, median {median(half_errors):.1%}, at most "
                f"{max(half_errors):.1%}"
            )
    return "; ".join(sentences)


def float8_summary(table: Sequence[TableRow]) -> str:
    """Return a line without context parallelism and one with it, as ``summary`` does."""
    lines = []
    for title, members in (
        ("cp 1", [row for row in table if row.labels["cp"] == 1]),
        ("cp 2 to 8", [row for row in table if row.labels["cp"] != 1]),
    ):
        lines.append(f"{title}: {summary(members)}")
    return "\n".join(lines)


TABLES: rows.TableFunctions = {
    "public": runs,
    "float8": float8_runs,
    "upipe": supported,
}
main = partial(rows.main, "records", TABLES, __doc__, public=summary, float8=float8_summary)

if __name__ == "__main__":
    run_command(main)
