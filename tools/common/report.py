"""Results: tables whose columns are data, as text, Markdown or CSV, figures kept as JSON lines, and
pictures.

A result is a dictionary. In its file, values that are lists of rows, or rows by name, become a line
per row, with the value's name under "of" and the row's under "key"; all other values go on the
first line.
"""

import csv
import io
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError
from runtime.files import replacing, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4D4D4D")
MASKED, INK, FAINT = "#C9CCD1", "#22262B", "#6B7280"
DIGITS = 12
"""Significant digits of a float: more than any figure quotes, and enough for four digits of
differences of losses.
"""
Row = Mapping[str, Any]
Column = str | Callable[[Any], Any]
"""A format of a row's fields, as ``"{seconds:.3f}"``, or a function of the row."""


def cell(column: Column, row: Row) -> str:
    """Return a row's cell of a column; empty where the row lacks a field, or has None."""
    if callable(column):
        value = column(row)
        return "" if value is None else str(value)
    for _, name, _, _ in Formatter().parse(column):
        if name:
            first, _, more = name.partition("[")
            held = row.get(first)
            if held is None or (more and Formatter().get_field(name, (), row)[0] is None):
                return ""
    return column.format_map(row)


@dataclass(frozen=True)
class Table:
    """Rows under columns by their heads; the first ``left`` columns hold words."""

    columns: Mapping[str, Column]
    rows: Sequence[Row] = ()
    left: int = 1

    @property
    def cells(self) -> list[list[str]]:
        """Return the text of every row."""
        return [[cell(column, row) for column in self.columns.values()] for row in self.rows]

    def text(self) -> list[str]:
        """Return lines in aligned columns."""
        return aligned([[*self.columns], *self.cells], range(self.left))

    def markdown(self, align: str = "---") -> list[str]:
        """Return lines of Markdown; ``align`` is ``---:`` for columns of numbers."""
        return markdown([*self.columns], self.cells, align)

    def line(self, row: Row) -> str:
        """Return a row by itself, each cell with its head: for what is printed as it is measured."""
        words = [cell(column, row) for column in self.columns.values()]
        named = (
            f"{head} {word}"
            for head, word in zip([*self.columns][self.left :], words[self.left :], strict=True)
        )
        return ": ".join(
            filter(None, [" ".join(filter(None, words[: self.left])), ", ".join(named)])
        )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> list[str]:
    """Return the lines of a Markdown table; ``align`` is ``---:`` for columns of numbers."""
    return [
        f"| {' | '.join(head)} |",
        f"| {align} " * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def aligned(lines: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Return the lines of a table in aligned columns, those of ``left`` to the left and numbers to
    the right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shape = "  ".join(
        f"{{:{'<' if place in left else '>'}{width}}}" for place, width in enumerate(widths)
    )
    return [shape.format(*line).rstrip() for line in lines]


def as_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table with a line for each row; floats have 6 digits."""
    out = io.StringIO()
    lines = (
        [f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows
    )
    csv.writer(out, lineterminator="\n").writerows([head, *lines])
    return out.getvalue()


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the lines of a result's file. Raises UserError: a row has a field named "of" or "key"."""
    first, rows = dict[str, Any](), list[dict[str, Any]]()
    for name, value in _short(result).items():
        if not (table := _rows(value)):
            first[name] = value
        for key, row in table:
            if clash := row.keys() & {"of", "key"}:
                raise UserError(
                    f"a row of {name} has a field {min(clash)!r}, which the file needs; rename it"
                )
            rows.append({"of": name, **({} if key is None else {"key": key}), **row})
    return [json.dumps(line) for line in (first, *rows)]


def write_records(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all, and make its folder."""
    write_text(path, "\n".join(lines_of(result)) + "\n")


def write_tables(path: Path, result: dict[str, Any], text: str) -> Path:
    """Write a result as JSON lines, and its tables as Markdown beside them; return the Markdown's
    path.
    """
    write_records(path, result)
    write_text(path.with_suffix(".md"), text)
    return path.with_suffix(".md")


def read_records(path: Path) -> dict[str, Any]:
    """Read the result that ``write_records`` wrote; digits of floats and the order of fields may
    differ.

    Raises OSError: the file cannot be read; UserError: a line is not JSON, or not an object.
    """
    result: dict[str, Any] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from None
        if not isinstance(line, dict) or (number > 1 and "of" not in line):
            raise UserError(f"{path}:{number} is no row of a result: {text[:60]}")
        if number == 1:
            result |= line
        elif "key" in line:
            result.setdefault(line.pop("of"), {})[line.pop("key")] = line
        else:
            result.setdefault(line.pop("of"), []).append(line)
    return result


def write_results(
    folder: Path,
    name: str,
    title: str,
    table: Sequence[str],
    found: dict[str, Any],
    figure: "Figure",
) -> None:
    """Print a title and a table, and write them as NAME.md, the figures as NAME.json, and a picture
    as NAME.png.
    """
    print("\n".join((title, *table)), flush=True)
    paths = [folder / f"{name}.{ending}" for ending in ("json", "md", "png")]
    with replacing(*paths) as (data, text, picture):
        data.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        text.write_text("\n".join((title, "", *table, "")), encoding="utf-8")
        figure.savefig(picture, dpi=120, format="png")
    print(f"written: {', '.join(map(str, paths))}", flush=True)


def plain(axes: "Axes") -> None:
    """Draw a light grid, and of the frame the left and the lower line alone."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: "Figure", path: Path, flag: str) -> None:
    """Write a picture in the format of its name, and say so. Raises UserError, naming ``flag``: no
    such format.
    """
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise UserError(
            f"{flag} is {path}, which names no picture format; end it in one of {', '.join(known)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def _rows(value: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """Return a table's rows with their keys, None in a list; an empty list if ``value`` is no
    table.
    """
    found = list(value.items()) if isinstance(value, dict) else []
    found = [(None, row) for row in value] if isinstance(value, list) else found
    return found if all(isinstance(row, dict) for _, row in found) else []


def _short(value: Any) -> Any:
    """Return a value with ``DIGITS`` significant digits of each float."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value
