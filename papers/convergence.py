"""LASP (Sun et al. 2024, arXiv:2404.02882): its table of convergence at small scale, with every
data-parallel backend.

A tiny TransNormer and a tiny Linear Transformer train on the standard library's sources, on 4
processes of a CPU: data parallel 4, and data parallel 2 x context parallel 2 with LASP, each with
the same batches of the same tokens. A finished run is written at once, and a table that is begun
goes on where it stopped.

    python -m papers.convergence                                           # 26 runs
    python -m papers.convergence --rows transnormer/fsdp transnormer/ddp   # some of them
    make lasp-table ARGS="--rows transnormer/ddp --iterations 5 --results runs/lasp"   # a short one
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from data.text.prepare import Request, prepare
from papers import rows
from papers.runs import Result, flags_of, keep_run, read_runs
from parallel.context.linear import state
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.training import Records, trainer_of
from train.tasks.language import LanguageTask

NAME = "lasp_convergence"
RESULTS = rows.FOLDER / "results" / f"{NAME}.jsonl"
"""A line for each run."""
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
"""In the paper's order."""
WAYS = ("without", "lasp")
CONTROL = "dropped"
"""With LASP, but no rank gets the state of the one before: what a table must tell apart to mean
anything.
"""
CONTROLLED = "ddp"
"""The backend of the rows that have such a run besides."""
RANKS, CONTEXT, BATCH, LENGTH, VOCABULARY = 4, 2, 8, 256, 1024
FLAGS = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} --global-batch-size {BATCH}
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --eval-iters 0 --save none --save-interval none --device cpu
    --context-parallel-method lasp
"""
LAST = 10
"""Final updates whose mean loss is the table's figure, besides the last loss."""
BOUND = 0.005
"""Largest relative difference of the loss with LASP from without."""
SIZES = {"ranks": RANKS, "sequences": BATCH, "seq_length": LENGTH, "vocabulary": VOCABULARY}


def published() -> dict[str, dict[str, float]]:
    """Return the losses of the paper's models of 0.4B parameters, with LASP and without, by our row
    names.
    """
    models, backends = (
        {title: name for name, title in names.items()} for names in (MODELS, BACKENDS)
    )
    return {
        f"{models[row['model']]}/{backends[row['backend']]}": {
            "without": float(row["loss_without_lasp"]),
            "lasp": float(row["loss_with_lasp"]),
        }
        for row in rows.published(NAME)
    }


def command_line(run: str, data: Path, iterations: int) -> list[str]:
    """Return the flags of pretrain_gpt.py for a run: a row of the table, with LASP or without."""
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
    """Return the table's figures of a run: the mean loss of the last updates, and the last."""
    return {"loss": fmean(losses[-LAST:]), "last": losses[-1]}


def difference(without: Mapping[str, float], lasp: Mapping[str, float]) -> float:
    """Return the larger relative difference with LASP from without, of the final mean loss and of
    the last loss.

    Infinite if either is not finite.
    """
    relative = [abs(lasp[name] / without[name] - 1) for name in ("loss", "last")]
    return max(relative) if all(x == x for x in relative) else float("inf")


def compared(result: Result) -> tuple[list[str], list[str]]:
    """Return a line for each finished row and each control: the relative difference with LASP from
    without.

    And the rows whose losses differ by more than the bound, and the controls that differ no more
    than their rows.
    """
    lines, wrong = list[str](), list[str]()
    for row in ROWS:
        without, lasp, dropped = (result["runs"].get(f"{row}/{way}") for way in (*WAYS, CONTROL))
        if without and lasp:
            lines.append(
                f"{row:32}{(exact := difference(without, lasp)):.1e} (the bound is {BOUND:.1%})"
            )
            wrong += [row] * (not exact <= BOUND)
            if dropped:
                control = difference(without, dropped)
                lines.append(
                    f"{row:32}{control:.1e} where states are dropped between ranks (control)"
                )
                wrong += [f"{row}/{CONTROL}"] * (not control > 100 * exact)
    return lines, wrong


def train(rank: int, world_size: int, flags: Sequence[str], dropped: bool = False) -> list[float]:
    """Train one rank of a run of pretrain_gpt.py, with states dropped if asked; return the first
    rank's losses.
    """
    log = Records()
    if dropped:  # in this rank's process alone
        plain = state.passages
        state.passages = lambda *given: tuple(
            replace(passage, source=None, target=None) for passage in plain(*given)
        )  # type: ignore[assignment]
    with trainer_of(LanguageTask, flags, log) as trainer:
        trainer.train()
    return [record["lm_loss"] for record in log.records]


def finished(wanted: Sequence[str], iterations: int, data: Path, path: Path) -> Result:
    """Train the wanted rows that ``path`` lacks, saving each run; return all that ``path`` then
    holds.

    Raises UserError: ``path`` holds runs of other settings, or another format; RuntimeError: a rank
    failed.
    """
    result = read_runs(path, {"iterations": iterations, **SIZES})
    names = [
        f"{row}/{way}"
        for row in wanted
        for way in (*WAYS, *[CONTROL] * row.endswith(f"/{CONTROLLED}"))
    ]
    missing = [name for name in names if name not in result["runs"]]
    if missing:
        prepare(Request(vocab_size=VOCABULARY, max_bytes=4 << 20), data, progress=False)
    else:
        print(
            f"all {len(names)} runs are in {path} already, nothing trained; --results DIR starts afresh"
        )
    for name in missing:
        flags, dropped = command_line(name, data, iterations), name.endswith(f"/{CONTROL}")
        run = partial(run_ranks, train, RANKS, flags, dropped, timeout=1800)
        figures_of_run = keep_run(result, path, name, lambda run=run: figures(run()[0]))  # type: ignore[misc]
        row, _, way = name.rpartition("/")
        message = f"loss {figures_of_run['loss']:.6f} (last {figures_of_run['last']:.6f}), {figures_of_run['seconds']:.0f} s"
        print(f"{row:32}{way:9} {message}", flush=True)
    return result


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command; finished runs stay, and the same command goes on. Return its exit status."""
    parser, data = parser_for("python -m papers.convergence", __doc__), Path("runs/papers/stdlib")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help="of: %(choices)s"
    )
    parser.add_argument(
        "--iterations", type=int, default=300, metavar="N", help="updates (default: %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS.parent,
        metavar="FOLDER",
        help="default: %(default)s",
    )
    parser.add_argument("--data", type=Path, default=data, metavar="PREFIX", help="%(default)s")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks' server
    if args.iterations < 2:
        raise UserError(f"--iterations is {args.iterations}; it must be 2 or more")
    lines, wrong = compared(
        finished(args.rows, args.iterations, args.data, args.results / RESULTS.name)
    )
    print("\n".join(lines))
    if wrong:
        raise UserError(
            f"with LASP the loss differs by more than {BOUND:.1%} in {', '.join(wrong)}"
        )


if __name__ == "__main__":
    run_command(main)
