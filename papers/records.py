"""Records: published end-to-end runs, and the longest sequences on one node (UPipe, arXiv:2602.21196)."""

from functools import partial

from papers import public, rows
from papers.jobs import LONG, Figures, Job, Runs, shown
from papers.ring import K, step_of
from papers.rows import Row
from parallel.context import make_plan
from planner.cluster import CLUSTERS, load_cluster
from planner.levers import FFN_CHUNK, LOSS_CHUNK
from planner.step_memory import Arrangement, StepShape, memory_of, offloaded
from tools.common.arguments import run_command

STAGES = 4
"""A rank of 8 has 4 of Llama 3's 32 query heads; in a stage, one."""
LEANEST = Arrangement(recompute="full", offload=True, loss_chunk=LOSS_CHUNK, ffn_chunk=FFN_CHUNK)
"""Layers computed again from inputs that lie in host memory, as the paper's runs do; all weights are sharded."""
CLUSTER = load_cluster(CLUSTERS / "h100_pod.toml")


def gb(work: StepShape, gpus: int, tokens: int, stages: int) -> float:
    """Return a GPU's predicted peak in 10^9 bytes, of Ulysses whose heads are exchanged in so many stages."""
    plan = make_plan("ulysses", seq_len=tokens, size=gpus, ulysses_head_chunks=stages)
    return sum(memory_of(work, plan, LEANEST).values()) / 1e9


def job(config: str, gpus: int, tokens: int) -> Job:
    """Return what measures a row: Ulysses at once and in stages."""
    return Job(
        gpu="h100",
        gpus=gpus,
        config=config,
        flags=f"--context-parallel-size {gpus} --seq-length {tokens} --context-parallel-method ulysses "
        f"--recompute-granularity full --recompute-offload --loss-chunk-size {LOSS_CHUNK} --ffn-chunk-size {FFN_CHUNK}",
        cases={"upipe": f"--ulysses-head-chunks {STAGES}", "ulysses": "--ulysses-head-chunks 1"},
        figures=_ran,
        iterations=LONG,
    )


def _ran(runs: Runs) -> Figures:
    found: Figures = {"supported": "yes" if runs["upipe"].fits else "no"}
    return {
        **found,
        **{f"{name}_{part}": shown(getattr(run, part)) for name, run in runs.items() for part in run._fields},
    }


def supported() -> list[Row]:
    """Return whether each length fits a GPU, with its predicted memory."""
    found = []
    for row in rows.published("records"):
        work, gpus, tokens = step_of(row["model"]), int(row["gpus"]), int(row["ktokens"]) * K
        plan = make_plan("ulysses", seq_len=tokens, size=gpus)
        ways = {"upipe_gb": gb(work, gpus, tokens, STAGES), "ulysses_gb": gb(work, gpus, tokens, 1)}
        ours: Figures = {
            "supported": "yes" if min(ways.values()) <= CLUSTER.memory_gb else "no",
            **{name: round(size, 1) for name, size in ways.items()},
            "host_gb": round(offloaded(work, plan, LEANEST) / 1e9, 1),
        }
        of: dict[str, str | int] = {"record": row["record"], "model": row["model"], "ktokens": int(row["ktokens"])}
        measures = job(row["model"], gpus, tokens)
        found.append(Row(of, {"supported": row["supported"]}, ours, f"{gpus} {row['gpu']} of 80 GB", job=measures))
    return found


TABLES: rows.Makers = {
    "public": public.runs,
    "upipe": supported,
}
main = partial(rows.main, "records", TABLES, __doc__, public=public.summary)

if __name__ == "__main__":
    run_command(main)
