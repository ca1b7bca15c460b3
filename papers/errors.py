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
PLANNER = {striped.EXACT: "speedup", striped.MASKED: "speedup"}
"""Published figures that other figures of the planner predict too, keyed by these."""


def all_errors() -> Iterator[TableRow]:
    """Yield the errors of each figure of each table: their number, mean without signs, largest."""
    for paper, tables in PAPERS.items():
        for name, rows_of in tables.items():
            apart = SET_APART.get((paper, name))
            members = [row for row in rows_of() if not apart or row.labels["half"] != apart]
            for figure, differences in differences_of(members).items():
                percents = [100.0 * difference for difference in differences]
                magnitudes = [abs(percent) for percent in percents]
                largest = percents[magnitudes.index(max(magnitudes))]
                labels = {"paper": paper, "table": name, "figure": figure.replace("_", " ")}
                errors = {
                    "rows": len(percents),
                    "off_percent": round(fmean(magnitudes), 1),
                    "largest_percent": round(largest, 1),
                }
                yield TableRow(labels, {}, errors, "any")


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
            if isinstance(published, float) and isinstance(value, float):
                differences[name].append(value / published - 1)
    return differences


TABLES: rows.TableFunctions = {
    "all": all_errors,
}
main = partial(rows.main, "errors", TABLES, __doc__)

if __name__ == "__main__":
    run_command(main)
