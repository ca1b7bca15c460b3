"""Markdown tables of results, and files that appear together."""

import json
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> list[str]:
    """Return the lines of a Markdown table; ``align`` is ``---:`` for columns of numbers."""
    return [f"| {' | '.join(head)} |", f"| {align} " * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def aligned(lines: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Return the lines of a table in aligned columns, those of ``left`` to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shape = "  ".join(f"{{:{'<' if place in left else '>'}{width}}}" for place, width in enumerate(widths))
    return [shape.format(*line).rstrip() for line in lines]


def write_results(
    folder: Path, name: str, title: str, table: Sequence[str], found: dict[str, Any], figure: "Figure"
) -> None:
    """Print a title and a table, and write them as NAME.md, what was found as NAME.json, and a picture as NAME.png."""
    print("\n".join((title, *table)), flush=True)
    paths = [folder / f"{name}.{ending}" for ending in ("json", "md", "png")]
    with replacing(*paths) as (data, text, picture):
        data.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        text.write_text("\n".join((title, "", *table, "")), encoding="utf-8")
        figure.savefig(picture, dpi=120, format="png")
    print(f"written: {', '.join(map(str, paths))}", flush=True)
