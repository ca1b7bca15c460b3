"""What other packages can do beside ours: docs/evidence/features.md, made from features.csv.

python -m bench.peers.features     # after a change of features.csv, which has what each cell says and where it was read
"""

import csv
from pathlib import Path

from runtime.files import write_text
from runtime.machine import ROOT
from tools.arguments import one_line_errors, parser_for, run_command
from tools.report import markdown

TABLE, PAGE = Path(__file__).with_suffix(".csv"), ROOT / "docs" / "evidence" / "features.md"
HEAD = """\
# What packages can do

A speed says nothing of what a package can do besides. Each cell is a link to where it was read on {date}, in a
snapshot of the public repository at the commit in the link; what exactly was read stands below. *Not found* means that
nothing was found there, not that there is nothing. Nothing of others was run for this page; what was run is in
[other packages](peers.md).
"""
DATE = "2026-11-22"
"""When all of features.csv was read."""


def page() -> str:
    """Return the page: a row for each package, and a list of what was read for each cell."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    features = list(dict.fromkeys(cell["feature"] for cell in cells))
    says: dict[str, list[str]] = {}
    read: list[list[str]] = []
    for cell in cells:
        says.setdefault(cell["package"], []).append(f"[{cell['says']}]({cell['source']})")
        read.append([cell["package"], cell["feature"], cell["read"]])
    table = markdown(["", *features], [[f"**{name}**", *row] for name, row in says.items()])
    sources = markdown(["package", "feature", "read"], [row for row in read if row[0] != "Longmesh"])
    made = "Made by `python -m bench.peers.features` from `bench/peers/features.csv`."
    return "\n".join([HEAD.format(date=DATE), *table, "", made, "", "## What was read", "", *sources]) + "\n"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser_for("python -m bench.peers.features", __doc__).parse_args(argv)
    write_text(PAGE, page())


if __name__ == "__main__":
    run_command(main)
