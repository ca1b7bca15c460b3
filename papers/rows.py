"""Tables of published, predicted and measured figures, as text, CSV and pictures.

A paper's module makes the rows of its tables, which tables/sheets.toml describes, and calls
``main``. A results file is only rewritten if its figures change, so its last column names the
commit that first produced them.
"""

import csv
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from bench.link.network import NetworkError
from papers.table import TableRow, as_csv, flat, made_by, measured_cells
from runtime.files import write_text
from runtime.machine import ROOT, commit_of
from tools.common.arguments import one_line_errors, parser_for
from tools.common.report import aligned

FOLDER = Path(__file__).parent


def published(name: str) -> list[dict[str, str]]:
    """Read the rows of a paper's table, tables/NAME.csv, keyed by column name."""
    with (FOLDER / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table of a paper: its entry in tables/sheets.toml, and the function that makes its rows."""

    name: str
    title: str
    where: str
    about: str
    needs: str = ""
    measures: bool = False
    """True if this machine can measure the table; ``rows`` then has the argument ``measured``."""
    writes: bool = True
    curves: Mapping[str, Any] | None = None
    """Columns and labels of the table's picture, for ``pictures.draw``; None if it has no picture.
    """
    rows: Callable[..., Iterable[TableRow]]
    summary: Callable[[Sequence[TableRow]], str] | None = None
    """Returns a line to print below the table."""


TableFunctions = Mapping[str, Callable[..., Iterable[TableRow]]]
"""Functions that make the rows of a table, keyed by the table's name."""


def sheets_of(
    paper: str, functions: TableFunctions, **summaries: Callable[[Sequence[TableRow]], str]
) -> tuple[str, dict[str, Sheet]]:
    """Return the bibliographic reference of a paper, and its tables keyed by name."""
    text = (FOLDER / "tables/sheets.toml").read_text(encoding="utf-8")
    described = tomllib.loads(text)[paper]
    sheets = {}
    for name, rows in functions.items():
        sheets[name] = Sheet(name=name, rows=rows, summary=summaries.get(name), **described[name])
    return described["source"], sheets


def stamp() -> dict[str, str]:
    """Return the date and the commit, with a note if files other than results have changed."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit_of(ROOT, ".", ":(exclude)*/results/*"),
    }


def _text(head: str, value: Any) -> str:
    """Return a cell as text: a number with four digits, a difference in percent."""
    if value is None:
        return ""
    if head.startswith("difference"):
        return f"{value:+.1%}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(base: Path, sheet: Sheet, rows: Sequence[TableRow]) -> None:
    """Write a table's files, and print which commit made the previous ones.

    A file with the same figures stays as it is, with its commit. So does a file with measured
    figures that the new rows lack: a measurement takes minutes or another machine, so a prediction
    alone must not replace it.
    """
    table = base.with_suffix(".csv")
    picture = base.with_suffix(".png")
    old = ""
    if table.exists():
        old = table.read_text(encoding="utf-8")

    old_maker = made_by(old)
    if old_maker and (picture.exists() or not sheet.curves):
        new = as_csv(rows, old_maker)
        message = ""
        if old == new:
            message = "equal, kept"
        elif not measured_cells(old) <= measured_cells(new):
            message = (
                "kept, since the new rows lack its measured figures; measure them with --measure, "
                "or remove the file"
            )
        print(
            f"{table} was made by {old_maker}: {message or 'written anew, since figures differ'}",
            file=sys.stderr,
        )
        if message:
            return

    now = stamp()
    write_text(table, as_csv(rows, f"{now['commit']}, {now['date']}"))
    if sheet.curves:
        from papers.pictures import draw  # imports matplotlib

        draw(sheet.curves, rows).savefig(picture, dpi=90)


@one_line_errors
def main(
    paper: str,
    functions: TableFunctions,
    description: str | None,
    argv: list[str] | None = None,
    **summaries: Callable[[Sequence[TableRow]], str],
) -> None:
    """Run the command of a paper: print its tables, and write them if --results is given.

    Args:
        paper: name of the paper's module, and of its section in tables/sheets.toml.
        functions: the functions that make each table's rows.
        summaries: functions that return a line to print below a table, keyed by its name.

    An error is printed as one line, and the exit status is then 1.
    """
    source, sheets = sheets_of(paper, functions, **summaries)
    parser = parser_for(f"python -m papers.{paper}", description)
    parser.add_argument(
        "--table", choices=list(sheets), help="table to make, one of %(choices)s (default: all)"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measure the tables that can be measured on this machine",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="folder to which CSV files and pictures are also written",
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    selected = [sheets[args.table]] if args.table else list(sheets.values())
    for sheet in selected:
        command = f"python -m papers.{paper} --table {sheet.name}"
        if args.measure and sheet.measures:
            command += " --measure"

        rows = _rows_of(sheet, measure=args.measure)
        print(text_of(sheet, rows, source, command))
        if args.results and sheet.writes:
            write(args.results / f"{paper}_{sheet.name}", sheet, rows)


def _rows_of(sheet: Sheet, *, measure: bool) -> list[TableRow]:
    """Make the rows of a table; with ``measure``, measure them too if this machine can.

    If it cannot, the reason is printed, and the rows have no measured figures.
    """
    if measure and not sheet.measures:
        print(
            f"{sheet.name} is only predicted, not measured: it needs {sheet.needs}",
            file=sys.stderr,
        )
    if measure and sheet.measures:
        try:
            return list(sheet.rows(measured=True))
        except NetworkError as error:
            print(
                f"{sheet.name} is only predicted, since it cannot be measured here: {error}",
                file=sys.stderr,
            )
    return list(sheet.rows())


def text_of(sheet: Sheet, rows: Sequence[TableRow], source: str, command: str) -> str:
    """Format a table under its title, its source and the description of its columns."""
    head, cells = flat(rows)
    body = []
    for row in cells:
        body.append([_text(name, value) for name, value in zip(head, row, strict=True)])

    now = stamp()
    machines = dict.fromkeys(row.hardware for row in rows)
    hardware = ", ".join(name for name in machines if name != "any")
    reference = f"{source}, {sheet.where}."
    if hardware:
        reference += f" {hardware}."
    prose = [
        reference,
        f"Made by `{command}` on {now['date']}, commit {now['commit']}.",
        sheet.about,
    ]
    prose = [fill(text, 120, break_long_words=False, break_on_hyphens=False) for text in prose]

    # A column's name is wrapped to its longest word, and all names end on the same line.
    wrapped = [wrap(name, max(map(len, name.split()))) for name in head]
    height = max(map(len, wrapped))
    padded = [[""] * (height - len(lines)) + lines for lines in wrapped]
    head_lines = list(zip(*padded, strict=True))
    table = aligned([*head_lines, *body], range(len(rows[0].labels)))

    if sheet.summary:
        table += ["", sheet.summary(rows)]
    return "\n".join(["\n\n".join([f"# {sheet.title}", *prose]), "", *table]) + "\n"
