"""Rows of a table: labels and figures, the figures' differences, and the table as CSV.

A row has published, predicted and, if this machine can measure them, measured figures. They have
the same names, so that their differences are computed in one place.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.common.report import as_csv as csv_of

Figures = Mapping[str, float | int | str | None]
"""Figures keyed by name; None if a row lacks one."""
COLUMNS = ("published", "analytic", "measured")
MADE_BY = "made by"


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its labels, keyed by column, and its figures.

    Figures with the same name can be compared. The ``analytic`` ones are predictions.
    """

    labels: Mapping[str, str | int]
    published: Figures
    analytic: Figures
    hardware: str
    """Hardware of the published figures, and of the measured ones; "any" if they do not depend on
    it."""
    measured: Figures | None = None

    @property
    def difference(self) -> dict[str, float]:
        """Relative difference of each predicted figure from the published one, keyed by name."""
        differences = {}
        for name, paper_value in self.published.items():
            value = self.analytic.get(name)
            if not isinstance(value, float | int) or not isinstance(paper_value, float | int):
                continue
            if paper_value:
                differences[name] = value / paper_value - 1
        return differences


def flat(rows: Sequence[TableRow]) -> tuple[list[str], list[list[Any]]]:
    """Return the names of all columns, and a list of cells for each row.

    Rows may have different figures: a column is added for each name that any row has, and the cells
    of rows without it are None.
    """
    columns: dict[tuple[str, str], None] = {}  # serves as an ordered set
    for part in ("labels", *COLUMNS, "difference"):
        for row in rows:
            for name in getattr(row, part) or ():
                columns[part, name] = None

    head = []
    for part, name in columns:
        title = name.replace("_", " ")
        head.append(title if part == "labels" else f"{part}: {title}")

    cells = []
    for row in rows:
        cells.append([(getattr(row, part) or {}).get(name) for part, name in columns])
    return head, cells


def as_csv(rows: Sequence[TableRow], maker: str) -> str:
    """Format a table as CSV, with its ``maker`` (commit and date) in the last column."""
    head, cells = flat(rows)
    return csv_of([*head, MADE_BY], [[*row, maker] for row in cells])


def made_by(table: str) -> str:
    """Return the commit and date of the program that wrote a CSV; empty if the CSV lacks them."""
    for row in csv.DictReader(io.StringIO(table)):
        return row.get(MADE_BY) or ""
    return ""


def measured_cells(table: str) -> set[tuple[int, str]]:
    """Return the row number and column name of each measured cell in a table's CSV."""
    cells = set()
    for number, row in enumerate(csv.DictReader(io.StringIO(table))):
        for name, value in row.items():
            if value and name.startswith("measured: "):
                cells.add((number, name))
    return cells
