"""Shared parts of the papers' tables: published figures, runs trained once and kept, Markdown and a picture.

Table NAME has its published figures in tables/NAME.csv and ours in results/: NAME.jsonl with a line per run, NAME.md
beside the paper's, NAME.png. The runs' curves are in NAME.curves.jsonl, which git ignores.
"""

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from tools.arguments import parser_for

FOLDER = Path(__file__).parent
Result = dict[str, Any]
"""The settings, the machine, and each finished run's figures by name, with its losses if kept."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: how to train its runs and how to show them."""

    name: str
    """Base name of its files."""
    ranks: int
    sizes: Mapping[str, int]
    """Settings of all runs; a file of runs of other sizes is refused."""
    vocabulary: int
    rows: Sequence[str]
    runs: Callable[[str], Sequence[str]]
    """(row) -> the names of its runs."""
    flags: Callable[[str, Path, int], Sequence[str]]
    """(run, data, updates) -> flags of pretrain_gpt.py."""
    figures: Callable[[Sequence[float]], dict[str, float]]
    """(losses) -> the figures that stay in the tree."""
    markdown: Callable[[Result], str]
    picture: Callable[[Result, Path], None]
    wrong: Callable[[Result], str]
    """(result) -> how the finished rows differ from the paper; empty if they agree."""


def published(name: str) -> list[dict[str, str]]:
    """Read the rows of a paper's table, tables/NAME.csv, by column name."""
    with (FOLDER / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def markdown_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format the lines of a Markdown table."""
    return [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def train(rank: int, world_size: int, flags: Sequence[str]) -> list[float]:
    """Train one rank of a run of pretrain_gpt.py; return the loss of each update on the first rank."""
    import pretrain_gpt
    from testing.training import Records, trainer_of

    log = Records()
    with trainer_of(pretrain_gpt, flags, log) as trainer:
        trainer.run()
    return [record["lm_loss"] for record in log.records]


def finished(
    table: Table, wanted: Sequence[str], iterations: int, data: Path, path: Path, tell: Callable[[str], None]
) -> Result:
    """Train the wanted rows that ``path`` lacks, saving each run; return all that ``path`` then holds.

    Raises:
        UserError: ``path`` holds runs of other settings, or another format.
        RuntimeError: a rank failed.
    """
    from data.text.prepare import Request, prepare
    from testing.machine import describe
    from testing.ranks import run_ranks
    from testing.records import write_records

    settings = {"iterations": iterations, **table.sizes}
    result = kept(path) or {"settings": settings, "runs": {}}
    if result["settings"] != settings:
        raise UserError(f"{path} holds runs of {result['settings']}, not of {settings}; give another --results")
    names = [name for row in wanted for name in table.runs(row)]
    missing = [name for name in names if name not in result["runs"]]
    if missing:
        prepare(Request(vocab_size=table.vocabulary, max_bytes=4 << 20), data, progress=False)
        result["machine"] = describe("cpu")
    else:
        tell(f"all {len(names)} runs are in {path} already, nothing trained; --results DIR starts afresh")
    for name in missing:
        start = time.perf_counter()
        losses = run_ranks(train, table.ranks, table.flags(name, data, iterations), timeout=1800)[0]
        figures = {**table.figures(losses), "seconds": time.perf_counter() - start}
        result["runs"][name] = {**figures, "losses": losses}
        curves = {key: {"losses": run["losses"]} for key, run in result["runs"].items() if "losses" in run}
        bare = {key: {k: v for k, v in run.items() if k != "losses"} for key, run in result["runs"].items()}
        write_records(curves_of(path), {"runs": curves})
        write_records(path, {**result, "runs": bare})
        row, _, way = name.rpartition("/")
        (first, loss), *others = table.figures(losses).items()
        more = ", ".join(f"{key} {value:.6f}" for key, value in others)
        tell(f"{row:32}{way:9} {first} {loss:.6f} ({more}), {figures['seconds']:.0f} s")
    return result


def curves_of(path: Path) -> Path:
    """Return the file of all updates' losses, which stays out of the tree."""
    return path.with_suffix(".curves.jsonl")


def kept(path: Path) -> Result | None:
    """Read a file of results and its curves; None if it does not exist."""
    from testing.records import read_records

    if not path.exists():
        return None
    result = {"runs": {}, **read_records(path)}
    if "settings" not in result:
        raise UserError(f"{path} holds no settings of runs; give another --results")
    curves = read_records(curves_of(path)).get("runs", {}) if curves_of(path).exists() else {}
    for name, run in result["runs"].items():
        run |= {"losses": curves[name]["losses"]} if name in curves else {}
    return result


@dataclass(kw_only=True)
class Panel:
    """A column of the picture: curves over updates above, their pairwise differences below."""

    title: str
    losses: list[tuple[Sequence[float], bool]] = field(default_factory=list)
    """Each curve, and whether it is dotted."""
    differences: dict[str, Sequence[float]] = field(default_factory=dict)
    """Curves by label."""


def picture(panels: Sequence[Panel], path: Path, bound: float, labels: tuple[str, str, str]) -> None:
    """Draw the columns; ``labels``: of the losses, of the differences, and the differences' title."""
    from matplotlib.figure import Figure

    from tools.pictures import FAINT, PALETTE

    figure = Figure(figsize=(10, 6.6), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", height_ratios=(2, 3), squeeze=False)
    for column, panel in enumerate(panels):
        losses, differences = axes[:, column]
        for curve, dotted in panel.losses:
            losses.plot(curve, ":" if dotted else "-", color=PALETTE[0], linewidth=1.2, alpha=0.5)
        losses.set_title(panel.title, loc="left", fontsize=11)
        colours = PALETTE[:4] + PALETTE[5:6] + PALETTE[7:]
        for colour, (name, curve) in zip(colours, panel.differences.items(), strict=False):
            differences.plot(curve, color=colour, linewidth=1.4, label=name)
        differences.axhline(bound, color=FAINT, linestyle="--", linewidth=1)
        at = {"xycoords": ("axes fraction", "data"), "xytext": (-4, 4), "textcoords": "offset points"}
        differences.annotate(f"bound {bound:.1%}", (1, bound), ha="right", color=FAINT, fontsize=9, **at)
        differences.set(yscale="log", xlabel="update")
        if panel.differences:
            differences.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0, 0.66))
        differences.set_title(labels[2], loc="left", fontsize=11)
        for ax in (losses, differences):
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel(labels[0])
    axes[1, 0].set_ylabel(labels[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def build_parser(table: Table, module: str, description: str | None) -> argparse.ArgumentParser:
    """Build the command line of a table's module."""
    parser = parser_for(f"python -m papers.{module}", description)
    rows = list(table.rows)
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help="of: %(choices)s")
    parser.add_argument("--iterations", type=int, default=300, metavar="N", help="updates (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=FOLDER / "results", metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument("--data", type=Path, default=Path("runs/papers/stdlib"), metavar="PREFIX", help="%(default)s")
    return parser


def run(table: Table, args: argparse.Namespace) -> int:
    """Train missing runs, write and print the table; return 1 if a row differs from the paper."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the ranks' server
    path = args.results / f"{table.name}.jsonl"
    try:
        if args.iterations < 2:
            raise UserError(f"--iterations is {args.iterations}; it must be 2 or more")
        result = finished(table, args.rows, args.iterations, args.data, path, lambda line: print(line, flush=True))
        path.with_suffix(".md").write_text(table.markdown(result), encoding="utf-8")
        without = [name for name, run in result["runs"].items() if "losses" not in run]
        if without:
            print(f"no picture: the curves of {len(without)} runs are not in {curves_of(path)}; --results DIR has all")
        else:
            table.picture(result, path.with_suffix(".png"))
        print("\n" + table.markdown(result))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, and the same command goes on", file=sys.stderr)
        return 130
    if wrong := table.wrong(result):
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    return 0
