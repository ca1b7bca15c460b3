"""Errors of the predictions, for each published table: where the planner is right, and where not.

A table's measured figures are not read, and nothing is measured.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

from papers import lasp, records, ring, rows, sizes, striped, wallfacer
from papers.table import TableRow
from tools.common.arguments import run_command

PAPERS: Mapping[str, rows.TableFunctions] = {
    "striped": striped.TABLES,
    "ring": ring.TABLES,
    "wallfacer": wallfacer.TABLES,
    "lasp": lasp.TABLES,
    "records": records.TABLES,
    "sizes": sizes.TABLES,
}
SET_APART = {("records", "public"): records.APART}
"""Value of the column ``half`` of rows that a table compares but does not count."""
FITTED_FIGURES = {
    ("striped", "speedups", striped.MASKED),
    ("records", "public", "seconds"),
    ("records", "float8", "seconds"),
}
"""Paper, table and figure for which constants were fitted to one half of the rows.

The two halves are listed apart, by the column ``half``. Nothing was fitted for other figures, but
one value of LASP's memory (``papers.lasp``).
"""
PLANNER = {striped.EXACT: "speedup", striped.MASKED: "speedup"}
"""Published figures that other figures of the planner predict too, keyed by these."""


def all_errors() -> Iterator[TableRow]:
    """Yield the errors of each figure of each table: their number, mean without signs, largest.

    A figure with fitted constants has a row for each half of the table.
    """
    for paper, tables in PAPERS.items():
        for name, rows_of in tables.items():
            apart = SET_APART.get((paper, name))
            members = [row for row in rows_of() if not apart or row.labels["half"] != apart]
            for figure, differences in differences_of(members).items():
                labels = {"paper": paper, "table": name, "figure": figure.replace("_", " ")}
                if (paper, name, figure) not in FITTED_FIGURES:
                    yield TableRow({**labels, "half": ""}, {}, summary(differences), "any")
                    continue
                for half in (records.FITTED, records.HELD_OUT):
                    in_half = [row for row in members if row.labels["half"] == half]
                    errors = summary(differences_of(in_half)[figure])
                    yield TableRow({**labels, "half": half}, {}, errors, "any")


def summary(differences: Sequence[float]) -> dict[str, float]:
    """Return the number of relative errors; in percent their mean without signs, and the largest.

    The largest has its sign.
    """
    percents = [100.0 * difference for difference in differences]
    magnitudes = [abs(percent) for percent in percents]
    largest = percents[magnitudes.index(max(magnitudes))]
    return {
        "rows": len(percents),
        "off_percent": round(fmean(magnitudes), 1),
        "largest_percent": round(largest, 1),
    }


def differences_of(members: Sequence[TableRow]) -> dict[str, list[float]]:
    """Return the relative errors of each figure that has both a prediction and a published value.

    Figures that are words, such as OOM, have none.
    """
    differences: dict[str, list[float]] = defaultdict(list)
    for row in members:
        for name, difference in row.difference.items():
            differences[name].append(difference)
        for name, published_name in PLANNER.items():
            published, value = row.published.get(published_name), row.analytic.get(name)
            if isinstance(published, int | float) and isinstance(value, int | float) and published:
                differences[name].append(value / published - 1)
    return differences


TABLES: rows.TableFunctions = {
    "all": all_errors,
}
main = partial(rows.main, "errors", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
