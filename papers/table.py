"""Published figures of the papers, tables/NAME.csv."""

import csv
from pathlib import Path

FOLDER = Path(__file__).parent


def published(name: str) -> list[dict[str, str]]:
    """Read the rows of a paper's table, tables/NAME.csv, by column name."""
    with (FOLDER / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
