"""LASP (Sun et al. 2024, arXiv:2404.02882): its table of convergence at small scale, with every data-parallel backend.

A tiny TransNormer and a tiny Linear Transformer train on the standard library's sources, on 4 processes of a CPU:
data parallel 4, and data parallel 2 x context parallel 2 with LASP, each with the same batches of the same tokens. A
finished run is written at once, and a table that is begun goes on where it stopped.

    python -m papers.lasp                                           # 24 runs
    python -m papers.lasp --rows transnormer/fsdp transnormer/ddp   # some of them; the table has what there is
    make lasp-table ARGS="--rows transnormer/ddp --iterations 5 --results runs/lasp"   # a short one
"""

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.arguments import parser_for

FOLDER = Path(__file__).parent
PUBLISHED = FOLDER / "tables" / "lasp_convergence.csv"
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
"""Updates whose mean loss is the figure of the table, beside that of the last."""
BOUND = 0.005
"""How far the loss with LASP may be from that without it, relative."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the paper's table: losses of a model of 0.4B parameters."""

    without: float
    lasp: float


def rows() -> list[str]:
    """The names of the table's rows, as the paper orders them."""
    return [f"{model}/{backend}" for model in MODELS for backend in BACKENDS]


def published() -> dict[str, Published]:
    """The paper's table by the names of our rows."""
    models, backends = ({title: name for name, title in names.items()} for names in (MODELS, BACKENDS))
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return {
            f"{models[row['model']]}/{backends[row['backend']]}": Published(
                without=float(row["loss_without_lasp"]), lasp=float(row["loss_with_lasp"])
            )
            for row in csv.DictReader(file)
        }


def command_line(row: str, way: str, data: Path, iterations: int) -> list[str]:
    """Flags of pretrain_gpt.py for a row of the table, with LASP or without."""
    model, backend = row.split("/")
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


def train(rank: int, world_size: int, flags: Sequence[str]) -> list[float]:
    """One rank of a run of pretrain_gpt.py: on the first, the loss of each update."""
    import pretrain_gpt
    from testing.training import Records, prepared_by

    log = Records()
    with prepared_by(pretrain_gpt, flags, log) as trainer:
        trainer.run()
    return [record["lm_loss"] for record in log.records]


def convergence(
    wanted: Sequence[str], iterations: int, data: Path, path: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Train what ``path`` does not hold yet of the wanted rows, and write it there run by run; all that it holds.

    Raises:
        ValueError: it holds runs of other settings.
        RuntimeError: a rank failed.
    """
    from data.text.prepare import Request, prepare
    from testing.machine import describe, write_json
    from testing.ranks import run_ranks

    sizes = {"ranks": RANKS, "sequences": BATCH, "seq_length": LENGTH, "vocabulary": VOCABULARY}
    settings = {"iterations": iterations, **sizes}
    result: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"settings": settings, "runs": {}}
    )
    if result["settings"] != settings:
        raise ValueError(f"{path} holds runs of {result['settings']}, not of {settings}; give another --results")
    missing = [(row, way) for row in wanted for way in WAYS if f"{row}/{way}" not in result["runs"]]
    if missing:
        prepare(Request(vocab_size=VOCABULARY, max_bytes=4 << 20), data, progress=False)
        result["machine"] = describe("cpu")
    else:
        tell(f"all {len(wanted) * len(WAYS)} runs are in {path} already, nothing trained; --results DIR starts afresh")
    for row, way in missing:
        start = time.perf_counter()
        losses = run_ranks(train, RANKS, command_line(row, way, data, iterations), timeout=1800)[0]
        seconds = time.perf_counter() - start
        result["runs"][f"{row}/{way}"] = {"losses": losses, "seconds": seconds}
        write_json(path, result)
        tell(f"{row:32}{way:9} loss {final(losses):.6f} (last {losses[-1]:.6f}), {seconds:.0f} s")
    return result


def final(losses: Sequence[float]) -> float:
    """The mean loss of the last updates."""
    return fmean(losses[-LAST:])


def difference(without: Sequence[float], lasp: Sequence[float]) -> float:
    """Of the loss with LASP from that without it, relative: of the mean over the last updates, or of the last, if more.

    Infinite where either is not finite.
    """
    pairs = ((final(without), final(lasp)), (without[-1], lasp[-1]))
    found = [abs(b / a - 1) for a, b in pairs]
    return max(found) if all(x == x for x in found) else float("inf")


def markdown(result: dict[str, Any]) -> str:
    """Our table beside the paper's."""
    settings, machine, theirs = result["settings"], result["machine"], published()
    lines = [
        "# LASP: convergence",
        "",
        f"{settings['iterations']} updates of {settings['sequences']} sequences of {settings['seq_length']} tokens, "
        f"2 layers of 64 channels, {settings['vocabulary']} vocabulary entries, on {settings['ranks']} processes: data "
        f"parallel {RANKS}, and data parallel {RANKS // CONTEXT} x context parallel {CONTEXT} with LASP. Loss in nats "
        f"per token, the mean of the last {LAST} updates, and in brackets the last. The difference is relative, of the "
        f"mean or of the last, whichever is more; it must be within {BOUND:.1%}. Beside it the paper's losses, of "
        f"models of 0.4B parameters.",
        "",
        f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}.",
        "",
        "| model | backend | without LASP | with LASP | difference | paper: without | with | difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows():
        runs = [result["runs"].get(f"{row}/{way}") for way in WAYS]
        if None in runs:
            continue
        model, backend = row.split("/")
        ours, paper = [run["losses"] for run in runs if run], theirs[row]
        figures = [f"{final(losses):.4f} ({losses[-1]:.4f})" for losses in ours]
        lines.append(
            f"| {MODELS[model]} | {BACKENDS[backend]} | {' | '.join(figures)} | {difference(*ours):.1e} "
            f"| {paper.without:.3f} | {paper.lasp:.3f} | {abs(paper.lasp / paper.without - 1):.1e} |"
        )
    return "\n".join(lines) + "\n"


def outside(result: dict[str, Any]) -> list[str]:
    """The finished rows whose two losses differ by more than the bound."""
    runs = result["runs"]
    pairs = {row: [runs[f"{row}/{way}"]["losses"] for way in WAYS if f"{row}/{way}" in runs] for row in rows()}
    return [row for row, pair in pairs.items() if len(pair) == len(WAYS) and not difference(*pair) <= BOUND]


def apart(without: Sequence[float], lasp: Sequence[float]) -> list[float]:
    """Of each update: how far the loss with LASP is from that without it, relative; the mean of the last updates."""
    each = [abs(b / a - 1) for a, b in zip(without, lasp, strict=True)]
    return [fmean(each[max(0, update + 1 - LAST) : update + 1]) for update in range(len(each))]


def picture(result: dict[str, Any], path: Path) -> None:
    """A column for each model: the losses of all runs, which lie on each other, and how far each pair is apart."""
    from matplotlib.figure import Figure

    from tools.layout_picture import FAINT, PALETTE

    figure = Figure(figsize=(10, 6.6), layout="constrained")
    panels = figure.subplots(2, len(MODELS), sharex=True, sharey="row", height_ratios=(2, 3), squeeze=False)
    for column, model in enumerate(MODELS):
        losses, differences = panels[:, column]
        runs = {name: run["losses"] for name, run in result["runs"].items() if name.startswith(f"{model}/")}
        for name, run in runs.items():
            losses.plot(run, ":" if name.endswith("/lasp") else "-", color=PALETTE[0], linewidth=1.2, alpha=0.5)
        losses.set_title(f"{MODELS[model]}: loss of {len(runs)} runs", loc="left", fontsize=11)
        curves: dict[tuple[float, ...], list[str]] = {}
        for backend in BACKENDS:
            pair = [runs[name] for way in WAYS if (name := f"{model}/{backend}/{way}") in runs]
            if len(pair) == len(WAYS):
                curves.setdefault(tuple(apart(*pair)), []).append(BACKENDS[backend])
        for colour, (curve, alike) in zip(PALETTE[:4] + PALETTE[5:6] + PALETTE[7:], curves.items(), strict=False):
            differences.plot(curve, color=colour, linewidth=1.4, label=", ".join(alike))
        differences.axhline(BOUND, color=FAINT, linestyle="--", linewidth=1)
        differences.annotate(
            f"bound {BOUND:.1%}",
            (1, BOUND),
            (-4, 4),
            ("axes fraction", "data"),
            "offset points",
            ha="right",
            color=FAINT,
            fontsize=9,
        )
        differences.set(yscale="log", xlabel="update")
        if curves:
            differences.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0, 0.66))
        differences.set_title("difference with LASP from without, by backend", loc="left", fontsize=11)
        for axes in (losses, differences):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("loss (nats per token)")
    panels[1, 0].set_ylabel(f"relative difference, mean of {LAST} updates")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = parser_for("python -m papers.lasp", __doc__)
    parser.add_argument(
        "--rows", nargs="+", choices=rows(), default=rows(), metavar="MODEL/BACKEND", help="of: %(choices)s"
    )
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="updates (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=FOLDER / "results", metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument("--data", type=Path, default=Path("runs/papers/stdlib"), metavar="PREFIX", help="%(default)s")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; its exit status is 1 where a row is outside the bound, or has no figures."""
    args = build_parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and by the ranks' server
    path = args.results / "lasp_convergence.json"
    try:
        if args.iterations < 2:
            raise ValueError(f"--iterations is {args.iterations}; it must be 2 or more")
        result = convergence(args.rows, args.iterations, args.data, path, lambda line: print(line, flush=True))
        path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
        picture(result, path.with_suffix(".png"))
        print("\n" + markdown(result))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, and the same command goes on", file=sys.stderr)
        return 130
    if wrong := outside(result):
        print(f"error: with LASP the loss differs by more than {BOUND:.1%} in {', '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
