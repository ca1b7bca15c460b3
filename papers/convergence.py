"""LASP (Sun et al. 2024, arXiv:2404.02882): its table of convergence at small scale.

A tiny TransNormer and a tiny Linear Transformer train on the sources of Python's standard library,
with every data-parallel backend, on 4 processes of a CPU. Each trains twice on the same batches:
with data parallel 4, and with data parallel 2 x context parallel 2 by LASP. A finished run is
written at once, and the same command resumes a table.

    python -m papers.convergence                                           # 26 runs
    python -m papers.convergence --rows transnormer/fsdp transnormer/ddp   # some of them
    make lasp-table ARGS="--rows transnormer/ddp --iterations 5 --results runs/lasp"   # a short one

A control shows that the comparison can fail: a run whose ranks never get the state of the previous
rank must differ from its row by far more than LASP does.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isnan
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.runs import Result, flags_of, keep_run, read_runs
from data.text.prepare import Request, prepare
from papers import rows
from parallel.context.linear import state
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.training import Records, trainer_of
from train.tasks.language import LanguageTask

NAME = "lasp_convergence"
RESULTS = rows.FOLDER / "results" / f"{NAME}.jsonl"
"""Results file, with a line for each finished run."""
MODELS = {"transnormer": "TransNormer", "linear_transformer": "LinearTransformer"}
BACKENDS = {
    "ddp": "DDP",
    "legacy_ddp": "LegacyDDP",
    "fsdp": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
ROWS = [f"{model}/{backend}" for model in MODELS for backend in BACKENDS]
"""Names of the rows, MODEL/BACKEND, in the paper's order."""
WAYS = ("without", "lasp")
CONTROL = "dropped"
"""Name of the control: with LASP, but states are dropped between ranks."""
CONTROLLED = "ddp"
"""Backend whose rows have a control."""
RANKS = 4
CONTEXT = 2
BATCH = 8
LENGTH = 256
VOCABULARY = 1024
FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH}
    --global-batch-size {BATCH} --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --eval-iters 0
    --save none --save-interval none --device cpu --context-parallel-method lasp
"""
LAST = 10
"""Number of final updates whose mean loss the table shows, in addition to the last loss."""
BOUND = 0.005
"""Maximum relative difference of the loss with LASP from the loss without."""
SIZES = {"ranks": RANKS, "sequences": BATCH, "seq_length": LENGTH, "vocabulary": VOCABULARY}


def published() -> dict[str, dict[str, float]]:
    """Return the losses of the paper's 0.4B models, with LASP and without, keyed by row."""
    models = {title: name for name, title in MODELS.items()}
    backends = {title: name for name, title in BACKENDS.items()}
    losses = {}
    for row in rows.published(NAME):
        name = f"{models[row['model']]}/{backends[row['backend']]}"
        losses[name] = {
            "without": float(row["loss_without_lasp"]),
            "lasp": float(row["loss_with_lasp"]),
        }
    return losses


def command_line(run: str, data: Path, iterations: int) -> list[str]:
    """Return the flags of pretrain_gpt.py for a run, which is named MODEL/BACKEND/WAY."""
    model, backend, way = run.split("/")
    dp = RANKS if way == "without" else RANKS // CONTEXT
    flags = {
        "model-type": model,
        "data-path": data,
        "tokenizer-model": f"{data}.model",
        "micro-batch-size": BATCH // dp,
        "train-iters": iterations,
        "lr-warmup-iters": min(10, iterations - 1),
        "log-interval": iterations,
        "data-parallel-sharding-strategy": backend,
        "context-parallel-size": RANKS // dp,
    }
    return [*FLAGS.split(), *flags_of(flags)]


def figures(losses: Sequence[float]) -> dict[str, float]:
    """Return the table's figures of a run: the mean loss of the last updates, and the last loss."""
    return {"loss": fmean(losses[-LAST:]), "last": losses[-1]}


def difference(without: Mapping[str, float], lasp: Mapping[str, float]) -> float:
    """Return how far the run with LASP is from the run without.

    This is the larger of two relative differences: that of the mean losses of the last updates, and
    that of the last losses. It is infinite if one of them is not a number.
    """
    differences = [abs(lasp[name] / without[name] - 1) for name in ("loss", "last")]
    if any(map(isnan, differences)):
        return inf
    return max(differences)


def compared(result: Result) -> tuple[list[str], list[str]]:
    """Return a line per finished row and control, and the names of those with wrong losses.

    A row is wrong if its loss with LASP differs from the loss without by more than the bound. A
    control is wrong if its difference is not more than 100 times as large as that of its row.
    """
    lines: list[str] = []
    wrong: list[str] = []
    for row in ROWS:
        without, lasp, dropped = (result["runs"].get(f"{row}/{way}") for way in (*WAYS, CONTROL))
        if not without or not lasp:
            continue
        exact = difference(without, lasp)
        lines.append(f"{row:32}{exact:.1e} (the bound is {BOUND:.1%})")
        if not exact <= BOUND:
            wrong.append(row)
        if dropped:
            control = difference(without, dropped)
            lines.append(f"{row:32}{control:.1e} if states are dropped between ranks (control)")
            if not control > 100 * exact:
                wrong.append(f"{row}/{CONTROL}")
    return lines, wrong


def train(rank: int, world_size: int, flags: Sequence[str], dropped: bool = False) -> list[float]:
    """Train one rank of a run of pretrain_gpt.py; on the first rank, return its losses.

    Args:
        dropped: drop the states that ranks pass on, for the control.
    """
    log = Records()
    if dropped:  # in this process only, which ends with the run
        passages = state.passages

        def without_states(*args: Any) -> tuple[Any, ...]:
            return tuple(replace(part, source=None, target=None) for part in passages(*args))

        state.passages = without_states  # type: ignore[assignment]
    with trainer_of(LanguageTask, flags, log) as trainer:
        trainer.train()
    return [record["lm_loss"] for record in log.records]


def _train_on_ranks(flags: Sequence[str], dropped: bool) -> dict[str, float]:
    """Train a run in new processes; return its figures."""
    return figures(run_ranks(train, RANKS, flags, dropped, timeout=1800)[0])


def finished(table: Sequence[str], iterations: int, data: Path, path: Path) -> Result:
    """Train and save the runs of ``table`` that ``path`` lacks; return all runs of ``path``.

    Raises UserError if ``path`` holds runs with other settings, or has another format, and
    RuntimeError if a rank failed.
    """
    result = read_runs(path, {"iterations": iterations, **SIZES})
    names = []
    for row in table:
        names += [f"{row}/{way}" for way in WAYS]
        if row.endswith(f"/{CONTROLLED}"):
            names.append(f"{row}/{CONTROL}")

    missing = [name for name in names if name not in result["runs"]]
    if not missing:
        print(
            f"all {len(names)} runs are in {path} already, so nothing is trained; give another "
            "--results to start another table"
        )
        return result

    prepare(Request(vocab_size=VOCABULARY, max_bytes=4 << 20), data, progress=False)
    for name in missing:
        flags = command_line(name, data, iterations)
        row, _, way = name.rpartition("/")
        final = keep_run(result, path, name, partial(_train_on_ranks, flags, way == CONTROL))
        print(
            f"{row:32}{way:9} loss {final['loss']:.6f} (last {final['last']:.6f}), "
            f"{final['seconds']:.0f} s",
            flush=True,
        )
    return result


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command, which saves finished runs and resumes; return its exit status."""
    parser = parser_for("python -m papers.convergence", __doc__)
    data = Path("runs/papers/stdlib")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=ROWS,
        metavar="ROW",
        help="rows to train, among %(choices)s",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=300,
        metavar="N",
        help="number of updates (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS.parent,
        metavar="FOLDER",
        help="folder of results (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=data,
        metavar="PREFIX",
        help="prefix of the text that runs read (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the fork server of the ranks
    if args.iterations < 2:
        raise UserError(f"--iterations is {args.iterations}; it must be 2 or more")

    path = args.results / RESULTS.name
    lines, wrong = compared(finished(args.rows, args.iterations, args.data, path))
    print("\n".join(lines))
    if wrong:
        raise UserError(
            f"with LASP, losses may differ by at most {BOUND:.1%}, and a control must differ 100 "
            f"times as much as its row; this does not hold for {', '.join(wrong)}"
        )


if __name__ == "__main__":
    run_command(main)
