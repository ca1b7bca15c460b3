"""LASP (Sun et al. 2024, arXiv:2404.02882): its table of convergence at small scale, with every data-parallel backend.

A tiny TransNormer and a tiny Linear Transformer train on the standard library's sources, on 4 processes of a CPU:
data parallel 4, and data parallel 2 x context parallel 2 with LASP, each with the same batches of the same tokens. A
finished run is written at once, and a table that is begun goes on where it stopped.

    python -m papers.convergence                                           # 24 runs
    python -m papers.convergence --rows transnormer/fsdp transnormer/ddp   # some of them; the table has what there is
    make lasp-table ARGS="--rows transnormer/ddp --iterations 5 --results runs/lasp"   # a short one
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from papers import table
from papers.table import Panel, Result, Table, markdown_rows

NAME = "lasp_convergence"
MODELS = {"transnormer": "TransNormer", "linear_transformer": "LinearTransformer"}
BACKENDS = {
    "ddp": "DDP",
    "legacy_ddp": "LegacyDDP",
    "fsdp": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
WAYS = ("without", "lasp")
RANKS, CONTEXT, BATCH, LENGTH, VOCABULARY = 4, 2, 8, 256, 1024
LAST = 10
"""Final updates whose mean loss is the table's figure, besides the last loss."""
BOUND = 0.005
"""Largest relative difference of the loss with LASP from without."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the paper's table: losses of a model of 0.4B parameters."""

    without: float
    lasp: float


def rows() -> list[str]:
    """Return the names of the table's rows in the paper's order."""
    return [f"{model}/{backend}" for model in MODELS for backend in BACKENDS]


def published() -> dict[str, Published]:
    """Return the paper's table by our row names."""
    models, backends = ({title: name for name, title in names.items()} for names in (MODELS, BACKENDS))
    return {
        f"{models[row['model']]}/{backends[row['backend']]}": Published(
            without=float(row["loss_without_lasp"]), lasp=float(row["loss_with_lasp"])
        )
        for row in table.published(NAME)
    }


def runs(row: str) -> list[str]:
    """Return the names of a row's two runs."""
    return [f"{row}/{way}" for way in WAYS]


def command_line(run: str, data: Path, iterations: int) -> list[str]:
    """Return the flags of pretrain_gpt.py for a run: a row of the table, with LASP or without."""
    model, backend, way = run.split("/")
    dp = RANKS // CONTEXT if way == "lasp" else RANKS
    flags = {
        "model-type": model,
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "data-path": data,
        "tokenizer-model": f"{data}.model",
        "device": "cpu",
        "seq-length": LENGTH,
        "global-batch-size": BATCH,
        "micro-batch-size": BATCH // dp,
        "train-iters": iterations,
        "lr": 2e-3,
        "min-lr": 2e-4,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": min(10, iterations - 1),
        "eval-iters": 0,
        "log-interval": iterations,
        "save": "none",
        "save-interval": "none",
        "data-parallel-sharding-strategy": backend,
        "context-parallel-size": RANKS // dp,
        "context-parallel-method": "lasp",
    }
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def final(losses: Sequence[float]) -> float:
    """Return the mean loss of the last updates."""
    return fmean(losses[-LAST:])


def figures(losses: Sequence[float]) -> dict[str, float]:
    """Return the table's figures of a run."""
    return {"loss": final(losses), "last": losses[-1]}


def difference(without: Mapping[str, float], lasp: Mapping[str, float]) -> float:
    """Return the larger relative difference with LASP from without, of the final mean loss and of the last loss.

    Infinite if either is not finite.
    """
    found = [abs(lasp[name] / without[name] - 1) for name in ("loss", "last")]
    return max(found) if all(x == x for x in found) else float("inf")


def markdown(result: Result) -> str:
    """Format our table beside the paper's."""
    settings, machine, theirs = result["settings"], result["machine"], published()
    last = min(LAST, settings["iterations"])
    lines = [
        "# LASP: convergence",
        "",
        f"{settings['iterations']} updates of {settings['sequences']} sequences of {settings['seq_length']} tokens, "
        f"2 layers of 64 channels, {settings['vocabulary']} vocabulary entries, on {settings['ranks']} processes: data "
        f"parallel {RANKS}, and data parallel {RANKS // CONTEXT} x context parallel {CONTEXT} with LASP. Loss in nats "
        f"per token, the mean of the last {last} updates, and in brackets the last. The difference is relative, of the "
        f"mean or of the last, whichever is more; it must be within {BOUND:.1%}. Beside it the paper's losses, of "
        f"models of 0.4B parameters.",
        "",
        f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}.",
        "",
    ]
    body = []
    for row, pair in _pairs(result).items():
        model, backend = row.split("/")
        paper = theirs[row]
        ours = [f"{run['loss']:.4f} ({run['last']:.4f})" for run in pair]
        beside = [f"{paper.without:.3f}", f"{paper.lasp:.3f}", f"{abs(paper.lasp / paper.without - 1):.1e}"]
        body.append([MODELS[model], BACKENDS[backend], *ours, f"{difference(*pair):.1e}", *beside])
    head = ["model", "backend", "without LASP", "with LASP", "difference", "paper: without", "with", "difference"]
    return "\n".join([*lines, *markdown_rows(head, body)]) + "\n"


def _pairs(result: Result) -> dict[str, list[dict[str, float]]]:
    """Return the two runs of each finished row, in the paper's order."""
    done = result["runs"]
    return {row: [done[name] for name in runs(row)] for row in rows() if all(name in done for name in runs(row))}


def outside(result: Result) -> list[str]:
    """Return the finished rows whose losses differ by more than the bound."""
    return [row for row, pair in _pairs(result).items() if not difference(*pair) <= BOUND]


def wrong(result: Result) -> str:
    """Say what is outside the bound; empty if nothing is."""
    found = ", ".join(outside(result))
    return f"with LASP the loss differs by more than {BOUND:.1%} in {found}" if found else ""


def apart(without: Sequence[float], lasp: Sequence[float]) -> list[float]:
    """Return per update the relative difference with LASP from without, averaged over the last updates."""
    each = [abs(b / a - 1) for a, b in zip(without, lasp, strict=True)]
    return [fmean(each[max(0, update + 1 - LAST) : update + 1]) for update in range(len(each))]


def picture(result: Result, path: Path) -> None:
    """Draw a column per model: the losses of all runs, and each pair's difference."""
    panels = []
    for model, title in MODELS.items():
        curves = {name: run["losses"] for name, run in result["runs"].items() if name.startswith(f"{model}/")}
        alike: dict[tuple[float, ...], list[str]] = {}
        for backend in BACKENDS:
            pair = [curves[name] for name in runs(f"{model}/{backend}") if name in curves]
            if len(pair) == len(WAYS):
                alike.setdefault(tuple(apart(*pair)), []).append(BACKENDS[backend])
        panels.append(
            Panel(
                title=f"{title}: loss of {len(curves)} runs",
                losses=[(curve, name.endswith("/lasp")) for name, curve in curves.items()],
                differences={", ".join(names): curve for curve, names in alike.items()},
            )
        )
    apart_by = f"relative difference, mean of {LAST} updates"
    title = "difference with LASP from without, by backend"
    table.picture(panels, path, BOUND, ("loss (nats per token)", apart_by, title))


CONVERGENCE = Table(
    name=NAME,
    ranks=RANKS,
    sizes={"ranks": RANKS, "sequences": BATCH, "seq_length": LENGTH, "vocabulary": VOCABULARY},
    vocabulary=VOCABULARY,
    rows=rows(),
    runs=runs,
    flags=command_line,
    figures=figures,
    markdown=markdown,
    picture=picture,
    wrong=wrong,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit with status 1 if a row is outside the bound, or has no figures."""
    return table.run(CONVERGENCE, table.build_parser(CONVERGENCE, "convergence", __doc__).parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
