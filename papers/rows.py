"""Tables row by row: published, predicted and measured, as text, CSV and a picture.

A paper's module makes the rows of its tables, which tables/sheets.toml describes, and calls
``main``.
"""

import csv
import io
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from bench.link.network import NetworkError
from runtime.files import write_text
from runtime.machine import ROOT, commit_of
from tools.common.arguments import one_line_errors, parser_for
from tools.common.report import aligned
from tools.common.report import as_csv as csv_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
Figures = Mapping[str, float | int | str | None]
"""Figures by name; None where there is none."""
COLUMNS, MADE_BY = ("published", "analytic", "measured"), "made by"


def published(name: str) -> list[dict[str, str]]:
    """Read the rows of a paper's table, tables/NAME.csv, by column name."""
    with (FOLDER / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Row:
    """A row of a table, ``of`` what by column; figures of one name are comparable, and analytic
    ones are predicted.
    """

    of: Mapping[str, str | int]
    published: Figures
    analytic: Figures
    hardware: str
    """The hardware of the published figures, and of the measured ones."""
    measured: Figures | None = None

    @property
    def difference(self) -> dict[str, float]:
        """Return how far each predicted figure is from the published one, relative to that."""
        pairs = {name: (self.analytic.get(name), value) for name, value in self.published.items()}
        return {
            name: ours / theirs - 1
            for name, (ours, theirs) in pairs.items()
            if isinstance(ours, float | int) and isinstance(theirs, float | int) and theirs
        }


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table of a paper, as tables/sheets.toml has and explains it, and what makes its rows."""

    name: str
    title: str
    where: str
    about: str
    needs: str = ""
    measures: bool = False
    """True if ``rows`` takes ``measured``, and this machine measures then."""
    writes: bool = True
    curves: Mapping[str, Any] | None = None
    """A picture in the paper's form."""
    rows: Callable[..., Iterable[Row]]
    summary: Callable[[Sequence[Row]], str] | None = None
    """A line below the table."""


Makers = Mapping[str, Callable[..., Iterable[Row]]]
"""Callables that make the rows of each table, by its name."""


def sheets_of(
    paper: str, makers: Makers, **summaries: Callable[[Sequence[Row]], str]
) -> tuple[str, dict[str, Sheet]]:
    """Return the reference of a paper, and its tables by name."""
    described = tomllib.loads((FOLDER / "tables/sheets.toml").read_text(encoding="utf-8"))[paper]
    sheets = {}
    for name, rows in makers.items():
        sheets[name] = Sheet(name=name, rows=rows, summary=summaries.get(name), **described[name])
    return described["source"], sheets


def stamp() -> dict[str, str]:
    """Return the date, and the commit with a note if anything but results differs from it."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit_of(ROOT, ".", ":(exclude)*/results/*"),
    }


def flat(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the names of all columns and the cells of all rows, None where a row has none."""
    parts = ("of", *COLUMNS, "difference")
    names: dict[tuple[str, str], None] = {}
    for part in parts:
        for row in rows:
            names |= {(part, name): None for name in getattr(row, part) or ()}
    head = [
        name.replace("_", " ") if part == "of" else f"{part}: {name.replace('_', ' ')}"
        for part, name in names
    ]
    return head, [[(getattr(row, part) or {}).get(name) for part, name in names] for row in rows]


def _text(head: str, value: Any) -> str:
    if value is None:
        return ""
    if head.startswith("difference"):
        return f"{value:+.1%}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def as_csv(rows: Sequence[Row], made: str) -> str:
    """Format a table with a line per row, and last who ``made`` it."""
    head, cells = flat(rows)
    return csv_of([*head, MADE_BY], [[*row, made] for row in cells])


def made_by(table: str) -> str:
    """Return the commit and date of the program that wrote a CSV; empty if it tells none."""
    return next(csv.DictReader(io.StringIO(table)), {}).get(MADE_BY) or ""


def _measured(table: str) -> set[tuple[int, str]]:
    """Return the measured cells of a table's CSV, by row and column."""
    rows = enumerate(csv.DictReader(io.StringIO(table)))
    return {
        (n, name)
        for n, row in rows
        for name, value in row.items()
        if value and name.startswith("measured: ")
    }


def write(base: Path, sheet: Sheet, rows: Sequence[Row]) -> None:
    """Write a table's files, and say which commit wrote them before.

    Equal ones stay that commit's, untouched, and so do those that have more measured figures.
    """
    table, picture, now = base.with_suffix(".csv"), base.with_suffix(".png"), stamp()
    old = table.read_text(encoding="utf-8") if table.exists() else ""
    if (before := made_by(old)) and (picture.exists() or not sheet.curves):
        new = as_csv(rows, before)
        message = "other figures now, written anew"
        if old == new:
            message = "equal, kept"
        elif not _measured(old) <= _measured(new):
            message = "measured figures that are not there now, kept; --measure gives them, or remove the file"
        print(f"{table} was made by {before}: {message}", file=sys.stderr)
        if not message.endswith("anew"):
            return
    write_text(table, as_csv(rows, f"{now['commit']}, {now['date']}"))
    if sheet.curves:
        draw(sheet.curves, rows).savefig(picture, dpi=90)


def colours(count: int) -> list[Any]:
    """Return that many colours, no two alike: of the palette or, beyond it, of a rainbow."""
    from matplotlib import colormaps

    from tools.common.report import PALETTE

    if count <= len(PALETTE):
        return list(PALETTE[:count])
    rainbow = colormaps["turbo"]
    return [rainbow(0.05 + 0.9 * index / (count - 1)) for index in range(count)]


def draw(curves: Mapping[str, Any], rows: Sequence[Row]) -> "Figure":
    """Draw the published figures as points and the predicted ones as lines, each line in a colour
    of its own.
    """
    from matplotlib.figure import Figure

    from tools.common.report import plain

    panels = [
        (name, list(panel_rows))
        for name, panel_rows in groupby(rows, key=lambda row: row.of.get(curves["panel"], ""))
    ]
    figure = Figure(figsize=(1.5 + 3.5 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (panel, shown) in zip(axes, panels, strict=True):
        names = dict.fromkeys(row.of[curves["curve"]] for row in shown)
        lines = [(name, pair) for name in names for pair in curves["figures"].items()]
        for colour, (name, pair) in zip(colours(len(lines)), lines, strict=True):
            curve = [row for row in shown if row.of[curves["curve"]] == name]
            words = [str(name)] if str(name) != str(panel) else []
            if len(curves["figures"]) > 1:
                words.append(pair[1].replace("_", " "))

            for figure_name, column, style in zip(pair, COLUMNS, ("o", "-"), strict=False):
                y = [getattr(row, column).get(figure_name) for row in curve]
                heights = [value if isinstance(value, float | int) else float("nan") for value in y]
                label = ", ".join(words) if style == "-" else None
                ax.plot(
                    [row.of[curves["x"]] for row in curve],
                    heights,
                    style,
                    color=colour,
                    alpha=0.8,
                    label=label,
                )
        ax.set(title=f"{panel}", xlabel=curves["x"].replace("_", " "))
        if all(isinstance(row.of[curves["x"]], int) for row in shown):
            ax.set_xscale("log", base=2)
        else:
            ax.tick_params(axis="x", rotation=60)
        if curves.get("logarithmic"):
            ax.set_yscale("log", base=2)
        plain(ax)
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel(curves["label"])
    figure.suptitle("points: published; lines: predicted", fontsize=9)
    return figure


@one_line_errors
def main(
    paper: str,
    makers: Makers,
    description: str | None,
    argv: list[str] | None = None,
    **summaries: Callable[[Sequence[Row]], str],
) -> None:
    """Run the command of a paper; return 1 after an error."""
    parser = parser_for(f"python -m papers.{paper}", description)
    source, tables = sheets_of(paper, makers, **summaries)
    parser.add_argument("--table", choices=list(tables), help="one of %(choices)s (default: all)")
    parser.add_argument(
        "--measure", action="store_true", help="also measure here what this machine can"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="also write CSV and pictures there"
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for sheet in [tables[args.table]] if args.table else tables.values():
        measures = args.measure and sheet.measures
        if args.measure and not measures:
            print(
                f"{sheet.name} is not measured, but predicted: it needs {sheet.needs}",
                file=sys.stderr,
            )
        try:
            rows = list(sheet.rows(measured=True) if measures else sheet.rows())
        except NetworkError as error:
            print(f"{sheet.name} is not measured here, but predicted: {error}", file=sys.stderr)
            rows = list(sheet.rows())
        command = f"python -m papers.{paper} --table {sheet.name}{' --measure' * measures}"
        print(text_of(sheet, rows, source, command))
        if args.results and sheet.writes:
            write(args.results / f"{paper}_{sheet.name}", sheet, rows)


def text_of(sheet: Sheet, rows: Sequence[Row], source: str, command: str) -> str:
    """Format a table under its title, its source and what its columns are."""
    (head, cells), made = flat(rows), stamp()
    body = [[_text(name, value) for name, value in zip(head, row, strict=True)] for row in cells]
    hardware = ", ".join(dict.fromkeys(row.hardware for row in rows if row.hardware != "any"))
    about = [
        f"{source}, {sheet.where}." + (f" {hardware}." if hardware else ""),
        f"Made by `{command}` on {made['date']}, commit {made['commit']}.",
        sheet.about,
    ]
    prose = [fill(text, 120, break_long_words=False, break_on_hyphens=False) for text in about]
    broken = [
        wrap(name, max(map(len, name.split()))) for name in head
    ]  # names of columns, below each other
    tallest = max(map(len, broken))
    above = zip(*([*[""] * (tallest - len(lines)), *lines] for lines in broken), strict=True)
    table = aligned([*above, *body], range(len(rows[0].of)))
    table += ["", sheet.summary(rows)] if sheet.summary else []
    return "\n".join(["\n\n".join([f"# {sheet.title}", *prose]), "", *table]) + "\n"
