"""Write results: tables as text, Markdown or CSV, numbers as JSON lines, and pictures.

A result is a dictionary. In its file, a value that is a list of rows, or a dictionary of rows,
becomes one line per row, with the value's name under "of" and the row's key under "key"; all other
values are on the first line.
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
MASKED = "#C9CCD1"
INK = "#22262B"
FAINT = "#6B7280"
DIGITS = 12
"""Number of significant digits of a saved float.

With 12, the difference of two nearly equal losses still has about four digits.
"""
Record = Mapping[str, Any]
Column = str | Callable[[Any], Any]
"""Rule for the cells of a table's column.

It is a format string with fields of the row, such as ``"{seconds:.3f}"``, or a function of the row.
"""


def cell(column: Column, row: Record) -> str:
    """Return a row's text in a column; empty if the row lacks a field."""
    if callable(column):
        value = column(row)
        if value is None:
            return ""
        return str(value)

    for _, name, _, _ in Formatter().parse(column):
        if not name:
            continue
        field, _, subfield = name.partition("[")
        if row.get(field) is None:
            return ""
        if subfield and Formatter().get_field(name, (), row)[0] is None:
            return ""

    return column.format_map(row)


@dataclass(frozen=True)
class Table:
    """Rows and the columns to show of them, keyed by the column's name.

    The first ``num_words`` columns are words, aligned left in text; the others are numbers.
    """

    columns: Mapping[str, Column]
    rows: Sequence[Record] = ()
    num_words: int = 1

    @property
    def cells(self) -> list[list[str]]:
        """Return the text of every cell, row by row."""
        return [self.row_cells(row) for row in self.rows]

    def row_cells(self, row: Record) -> list[str]:
        """Return the text of each cell of a row."""
        return [cell(column, row) for column in self.columns.values()]

    def text(self) -> list[str]:
        """Return the table's lines as plain text with aligned columns."""
        return aligned([[*self.columns], *self.cells], range(self.num_words))

    def markdown(self, align: str = "---") -> list[str]:
        """Return the table's lines as Markdown; ``align`` is ``---:`` to align columns right."""
        return markdown([*self.columns], self.cells, align)

    def line(self, row: Record) -> str:
        """Return one row as a line, to print it once it is measured: words, then named numbers."""
        heads = [*self.columns]
        words = self.row_cells(row)
        title = " ".join(filter(None, words[: self.num_words]))

        numbers = []
        for head, word in zip(heads[self.num_words :], words[self.num_words :], strict=True):
            numbers.append(f"{head} {word}")

        return ": ".join(filter(None, [title, ", ".join(numbers)]))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> list[str]:
    """Return the lines of a Markdown table; ``align`` is ``---:`` to align columns right."""
    lines = [f"| {' | '.join(head)} |", f"| {align} " * len(head) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return lines


def aligned(lines: Sequence[Sequence[str]], words: Container[int] = (0,)) -> list[str]:
    """Format lines of cells in columns; those of ``words`` are aligned left, others right."""
    formats = []
    for index, column in enumerate(zip(*lines, strict=True)):
        width = max(map(len, column))
        if index in words:
            formats.append(f"{{:<{width}}}")
        else:
            formats.append(f"{{:>{width}}}")

    line_format = "  ".join(formats)
    return [line_format.format(*line).rstrip() for line in lines]


def as_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV, a line per row; floats have 6 significant digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        cells = []
        for value in row:
            if isinstance(value, float):
                value = f"{value:.6g}"
            cells.append(value)
        writer.writerow(cells)

    return out.getvalue()


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return the lines of a result's file, each as JSON; the module's docstring describes them.

    Raises UserError if a row has a field named "of" or "key".
    """
    first: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, value in _short(result).items():
        table = _rows(value)
        if not table:
            first[name] = value
        for key, row in table:
            clash = row.keys() & {"of", "key"}
            if clash:
                raise UserError(
                    f"a row of {name} has a field {min(clash)!r}, but the file needs that name; "
                    "rename the field"
                )

            labels = {"of": name}
            if key is not None:
                labels["key"] = key
            rows.append({**labels, **row})

    return [json.dumps(line) for line in (first, *rows)]


def write_records(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON lines, atomically, and create its folder."""
    write_text(path, "\n".join(lines_of(result)) + "\n")


def write_tables(path: Path, result: dict[str, Any], text: str) -> Path:
    """Write a result as JSON lines and its tables as Markdown; return the Markdown's path."""
    write_records(path, result)
    write_text(path.with_suffix(".md"), text)
    return path.with_suffix(".md")


def read_records(path: Path) -> dict[str, Any]:
    """Read a result that ``write_records`` wrote.

    It may differ from the written result in the last digits of floats and the order of fields.

    Raises OSError if the file cannot be read, and UserError if a line is not JSON or not a row.
    """
    result: dict[str, Any] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from None
        if not isinstance(line, dict) or (number > 1 and "of" not in line):
            raise UserError(f"{path}:{number} is not a row of a result: {text[:60]}")
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
    result: dict[str, Any],
    figure: "Figure",
) -> None:
    """Print a title and a table; write them, the numbers and the picture to a folder.

    The files are NAME.md, NAME.json (``result``) and NAME.png (``figure``).
    """
    print("\n".join((title, *table)), flush=True)
    paths = [folder / f"{name}.{ending}" for ending in ("json", "md", "png")]
    with replacing(*paths) as (data, text, picture):
        data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text.write_text("\n".join((title, "", *table, "")), encoding="utf-8")
        figure.savefig(picture, dpi=120, format="png")

    print(f"written: {', '.join(map(str, paths))}", flush=True)


def plain(axes: "Axes") -> None:
    """Draw a light grid, and only the left and the lower line of the frame."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: "Figure", path: Path, flag: str) -> None:
    """Write a picture in the format of its file name, and print the path.

    Raises UserError if the extension is not a picture format; the message names ``flag``.
    """
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise UserError(
            f"{flag} is {path}, but its extension is not a picture format; use one of "
            f"{', '.join(formats)}"
        )

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def _rows(value: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """Return the (key, row) pairs of a dictionary or list (key None) of rows, else nothing."""
    rows: list[tuple[str | None, Any]] = []
    if isinstance(value, dict):
        rows = list(value.items())
    elif isinstance(value, list):
        rows = [(None, row) for row in value]
    if not all(isinstance(row, dict) for _, row in rows):
        return []

    return rows


def _short(value: Any) -> Any:
    """Round every float in a value to ``DIGITS`` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value
