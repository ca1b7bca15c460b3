"""LASP (Sun et al. 2024, arXiv:2404.02882): volumes, scalability, longest sequences by activation
saving, convergence.

python -m papers.lasp python -m papers.lasp --table volumes --measure         # bytes counted on 4
processes python -m papers.lasp --table convergence --measure     # trains what is not in
papers/results yet (20 minutes)
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from papers import convergence, rows
from papers.ring import K, step_of
from papers.rows import Figures, Row
from papers.runs import commit_told, read_runs, run_all
from papers.wallfacer import HEADS, TOKENS, WIDTH, count, here, planned
from parallel.context import make_plan
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape
from runtime.ranks import run_ranks
from tools.common.arguments import run_command

RANKS, MEMORY_GB = 4, 80.0
STATES, OUTPUT = "weights, gradients, optimizer", "a layer's backward, or the logits"
DDP_STATES_GB = 22.5
"""Fitted to the floor of DDP's column: 22 bytes a parameter, where the planner has 18. FSDP has no
fitted constant.
"""
LOGIT_BYTES = 12
"""A loss that is not fused holds logits and their gradient in 16 bits, log-probabilities and theirs
in 32.
"""


@lru_cache
def model() -> StepShape:
    """Return the work of a step of TransNormer 1B in bfloat16, batch 1, whose gradients are there
    throughout.
    """
    return replace(step_of("transnormer_1b"), micro_batches=2)


def volumes(measured: bool = False) -> Iterator[Row]:
    """Yield the elements that a rank sends in a layer's forward, of 262,144 tokens on 16 ranks, and
    counted bytes.
    """
    work, tokens, ranks = model(), 256 * K, 16
    d, small = work.hidden, HEADS * WIDTH
    by_method = {
        "lasp": ("B d^2 / h", d**2 // work.heads, 4 * small**2 // HEADS),
        "ulysses": ("4 B N d / T", 4 * tokens * d // ranks, 2 * 4 * TOKENS * small // RANKS),
        "megatron_sp": ("2 B N d + 4 B N d / T", 2 * tokens * d + 4 * tokens * d // ranks, None),
    }
    ours = ("lasp", "ulysses")
    bytes_sent = run_ranks(count, RANKS, [(name, {}, True) for name in ours])[1] if measured else []
    sent, where = dict(zip(ours, bytes_sent, strict=False)), here(RANKS) if measured else "any"
    for name, (formula, elements, counted) in by_method.items():
        analytic: Figures = {}
        if counted is not None:
            both = planned(make_plan(name, seq_len=tokens, size=ranks), work.heads, work.head_dim)
            analytic = {"elements": sum(both) // (4 if name == "lasp" else 2)}
        counts = {"bytes": sum(sent[name]), "formula_bytes": counted} if name in sent else None
        yield Row(
            {"method": name, "formula": formula}, {"elements": elements}, analytic, where, counts
        )


def memory_gb(
    tokens: int, backend: str, gpus: int, lasp: bool = True, recompute: str = "none"
) -> float:
    """Return the peak of a rank in 10^9 bytes, of ``tokens`` on ``gpus`` ranks or, without LASP, on
    each.

    DDP holds its states throughout. FSDP as the paper runs it holds all weights at the end of the
    forward, with the shards of the rest (the planner's zero2), and at the end of the backward all
    gradients too (zero1), without activations: their larger one is the peak.
    """
    work, plan = model(), make_plan("lasp", seq_len=tokens, size=gpus if lasp else 1)

    def parts(strategy: str) -> dict[str, float]:
        return memory_of(
            work, plan, Arrangement(dp=gpus // plan.size, strategy=strategy, recompute=recompute)
        )  # type: ignore[arg-type]

    forward = parts("zero2" if backend == "FSDP" else "ddp")
    forward[OUTPUT] = max(forward[OUTPUT], plan.local_len * work.vocab * LOGIT_BYTES)
    if backend == "FSDP":
        return max(sum(forward.values()), parts("zero1")[STATES]) / 1e9
    return DDP_STATES_GB + (sum(forward.values()) - forward[STATES]) / 1e9


def scalability() -> Iterator[Row]:
    """Yield the memory of every length and number of GPUs, "OOM" beyond 80 GB."""
    for backend in ("DDP", "FSDP"):
        for row in sorted(rows.published("lasp_scalability"), key=lambda row: int(row["gpus"])):
            tokens, gpus = int(row["seq_len"]), int(row["gpus"])
            size = memory_gb(tokens, backend, gpus)
            theirs, rate = (
                row[f"{backend.lower()}_{name}"] for name in ("memory_gb", "tokens_per_s")
            )
            labels = {"backend": backend, "gpus": gpus, "seq_len": tokens}
            published: Figures = {
                name: "OOM" if value == "OOM" else float(value)
                for name, value in (("gb", theirs), ("tokens_per_s", rate))
            }
            ours: Figures = {"gb": round(size, 1) if size <= MEMORY_GB else "OOM"}
            yield Row(labels, published, ours, "A100 of 80 GB")


def ablation() -> Iterator[Row]:
    """Yield the longest sequence, in 1,024 tokens, by backend, recomputation (AC) and LASP, on 8
    GPUs.
    """
    for row in rows.published("lasp_activation_ablation"):
        backend, *ways = row["method"].split("+")
        recompute = "full" if "AC" in ways else "none"
        needed = partial(
            memory_gb, backend=backend, gpus=8, lasp="LASP" in ways, recompute=recompute
        )
        longest = bisect_right(range(K, 2048 * K, K), MEMORY_GB, key=needed)
        theirs = int(row["max_sequence_ktokens_8xA100_80GB"])
        published = {"ktokens": theirs, "tokens_per_s": float(row["tokens_per_s"])}
        yield Row({"method": row["method"]}, published, {"ktokens": longest}, "8 A100 of 80 GB")


def trained(measured: bool = False) -> Iterator[Row]:
    """Yield the losses of the paper and those of the tiny models in papers/results, first training
    what is missing.
    """
    if measured:
        run_all(convergence.main)
    result, where = read_runs(convergence.RESULTS), ""
    if result["runs"]:
        on = result["machine"]
        commit = commit_told(on.get("commit", "unknown"))
        where = f"; measured on {on['device']}, {on['date'][:10]}, {commit}, tiny models"
    for name, theirs in convergence.published().items():
        losses = {
            way: result["runs"].get(f"{name}/{way}", {}).get("loss") for way in convergence.WAYS
        }
        yield Row(
            {"row": name}, theirs, {}, f"8 A100{where}", None if None in losses.values() else losses
        )


TABLES: rows.Makers = {
    "volumes": volumes,
    "scalability": scalability,
    "ablation": ablation,
    "convergence": trained,
}
main = partial(rows.main, "lasp", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
