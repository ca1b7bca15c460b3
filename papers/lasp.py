"""LASP (Sun et al. 2024, arXiv:2404.02882): the tables of the paper.

Volumes, scalability, longest sequences by activation saving, and convergence.

    python -m papers.lasp
    python -m papers.lasp --table volumes --measure      # bytes counted on 4 processes
    python -m papers.lasp --table convergence --measure  # trains all missing runs (20 minutes)
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from bench.runs import commit_note, read_runs, run_all
from papers import convergence, rows
from papers.ring import K, step_of
from papers.table import Figures, TableRow
from papers.wallfacer import HEADS, TOKENS, WIDTH, count, here, planned
from parallel.context import make_plan
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from runtime.ranks import run_ranks
from tools.common.arguments import run_command

RANKS = 4
MEMORY_GB = 80.0
STATES = "weights, gradients, optimizer"
OUTPUT = "a layer's backward, or the logits"
DDP_STATES_GB = 22.5
"""Memory of DDP's weights, gradients and optimizer in 10^9 bytes. It is fitted to the smallest
value in DDP's column: 22 bytes per parameter, while the planner counts 18. No constant is fitted
for FSDP."""
LOGIT_BYTES = 12
"""Bytes per logit of a loss that is not fused: the logit and its gradient in 16 bits, the
log-probability and its gradient in 32."""


@lru_cache
def model() -> StepShape:
    """Return the work of a step of TransNormer 1B in bfloat16, batch 1.

    It has two micro-batches, so that the gradients are in memory during the whole step.
    """
    return replace(step_of("transnormer_1b"), micro_batches=2)


def volumes(measured: bool = False) -> Iterator[TableRow]:
    """Yield the elements that a rank sends in a layer's forward pass, and bytes if ``measured``.

    The elements are for 262,144 tokens on 16 ranks; the bytes are counted in a small case on 4
    processes.
    """
    work = model()
    tokens = 256 * K
    ranks = 16
    d = work.hidden
    small = HEADS * WIDTH
    by_method = {
        "lasp": ("B d^2 / h", d**2 // work.heads, 4 * small**2 // HEADS),
        "ulysses": ("4 B N d / T", 4 * tokens * d // ranks, 2 * 4 * TOKENS * small // RANKS),
        "megatron_sp": ("2 B N d + 4 B N d / T", 2 * tokens * d + 4 * tokens * d // ranks, None),
    }
    methods = ("lasp", "ulysses")
    where = "any"
    sent = {}
    if measured:
        where = here(RANKS)
        bytes_sent = run_ranks(count, RANKS, [(name, {}, True) for name in methods])[1]
        sent = dict(zip(methods, bytes_sent, strict=True))

    for name, (formula, elements, formula_bytes) in by_method.items():
        analytic: Figures = {}
        if formula_bytes is not None:
            plan = make_plan(name, seq_len=tokens, size=ranks)
            plan_bytes = sum(planned(plan, work.heads, work.head_dim))
            element_size = 4 if name == "lasp" else 2
            analytic = {"elements": plan_bytes // element_size}
        counts = None
        if name in sent:
            counts = {"bytes": sum(sent[name]), "formula_bytes": formula_bytes}
        labels = {"method": name, "formula": formula}
        yield TableRow(labels, {"elements": elements}, analytic, where, counts)


def memory_gb(
    tokens: int, backend: str, gpus: int, lasp: bool = True, recompute: str = "none"
) -> float:
    """Return a rank's peak memory in 10^9 bytes.

    The ``tokens`` are divided among ``gpus`` ranks; without LASP, each rank has a sequence of
    ``tokens``.

    DDP keeps all weights, gradients and optimizer states throughout. FSDP, as the paper runs it,
    holds all weights and shards of the rest at the end of the forward pass (the planner's zero2).
    At the end of the backward pass it holds all gradients too (zero1), but no activations. The
    larger of the two is the peak.
    """
    work = model()
    plan = make_plan("lasp", seq_len=tokens, size=gpus if lasp else 1)

    def parts(strategy: str) -> dict[str, float]:
        arranged = Arrangement(
            dp=gpus // plan.size,
            strategy=strategy,  # type: ignore[arg-type]
            recompute=recompute,
        )
        return memory_of(work, plan, arranged)

    forward = parts("zero2" if backend == "FSDP" else "ddp")
    forward[OUTPUT] = max(forward[OUTPUT], plan.local_len * work.vocab * LOGIT_BYTES)
    if backend == "FSDP":
        return max(sum(forward.values()), parts("zero1")[STATES]) / 1e9
    return DDP_STATES_GB + (sum(forward.values()) - forward[STATES]) / 1e9


def scalability() -> Iterator[TableRow]:
    """Yield a rank's memory for every length and number of GPUs; "OOM" beyond 80 GB."""
    table = sorted(rows.published("lasp_scalability"), key=lambda row: int(row["gpus"]))
    for backend in ("DDP", "FSDP"):
        for row in table:
            tokens = int(row["seq_len"])
            gpus = int(row["gpus"])
            published: dict[str, str | float] = {}
            for name, column in (("gb", "memory_gb"), ("tokens_per_s", "tokens_per_s")):
                value = row[f"{backend.lower()}_{column}"]
                published[name] = value if value == "OOM" else float(value)

            size = memory_gb(tokens, backend, gpus)
            predictions: Figures = {"gb": round(size, 1) if size <= MEMORY_GB else "OOM"}
            labels = {"backend": backend, "gpus": gpus, "seq_len": tokens}
            yield TableRow(labels, published, predictions, "A100 of 80 GB")


def ablation() -> Iterator[TableRow]:
    """Yield the longest sequence on 8 GPUs per backend, with or without recomputation and LASP.

    Lengths are in units of 1,024 tokens.
    """
    for row in rows.published("lasp_activation_ablation"):
        backend, *options = row["method"].split("+")
        needed = partial(
            memory_gb,
            backend=backend,
            gpus=8,
            lasp="LASP" in options,
            recompute="full" if "AC" in options else "none",
        )
        # Memory grows with the length, so the number of lengths that fit is the longest one, in K.
        longest = bisect_right(range(K, 2048 * K, K), MEMORY_GB, key=needed)
        published = {
            "ktokens": int(row["max_sequence_ktokens_8xA100_80GB"]),
            "tokens_per_s": float(row["tokens_per_s"]),
        }
        labels = {"method": row["method"]}
        yield TableRow(labels, published, {"ktokens": longest}, "8 A100 of 80 GB")


def trained(measured: bool = False) -> Iterator[TableRow]:
    """Yield the losses of the paper and those of the tiny models in papers/results.

    If ``measured``, missing runs are trained first.
    """
    if measured:
        run_all(convergence.main)
    result = read_runs(convergence.RESULTS)
    hardware = "8 A100"
    if result["runs"]:
        machine = result["machine"]
        commit = commit_note(machine.get("commit", "unknown"))
        date = machine["date"][:10]
        hardware += f"; measured on {machine['device']}, {date}, {commit}, tiny models"

    for name, losses in convergence.published().items():
        tiny_losses = {}
        for way in convergence.WAYS:
            tiny_losses[way] = result["runs"].get(f"{name}/{way}", {}).get("loss")
        complete = None not in tiny_losses.values()
        yield TableRow({"row": name}, losses, {}, hardware, tiny_losses if complete else None)


TABLES: rows.TableFunctions = {
    "volumes": volumes,
    "scalability": scalability,
    "ablation": ablation,
    "convergence": trained,
}
main = partial(rows.main, "lasp", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
