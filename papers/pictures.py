"""Pictures of papers' tables: the published figures as points, the predicted ones as lines.

A point on its line is a prediction that holds. Panels share their y axis, so that their curves,
often of different hardware, can be compared.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from papers.table import TableRow
from tools.common.report import PALETTE, plain


def colours(count: int) -> list[Any]:
    """Return ``count`` colours: the palette's first, or a rainbow's if the palette has fewer."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    rainbow = colormaps["turbo"]
    return [rainbow(0.05 + 0.9 * index / (count - 1)) for index in range(count)]


def draw(curves: Mapping[str, Any], rows: Sequence[TableRow]) -> Figure:
    """Draw published figures as points and predicted ones as lines, in a colour for each curve.

    Args:
        curves: the table's entry in tables/sheets.toml. ``panel``, ``curve`` and ``x`` name
            columns of labels; ``figures`` has pairs of a published figure and the predicted one;
            ``label`` is the label of the y axis.
        rows: the table's rows, sorted by panel.
    """
    panels = []
    for panel, group in groupby(rows, key=lambda row: row.labels.get(curves["panel"], "")):
        panels.append((panel, list(group)))

    figure = Figure(figsize=(1.5 + 3.5 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (panel, panel_rows) in zip(axes, panels, strict=True):
        _draw_curves(ax, curves, panel, panel_rows)

        ax.set(title=f"{panel}", xlabel=curves["x"].replace("_", " "))
        if all(isinstance(row.labels[curves["x"]], int) for row in panel_rows):
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


def _draw_curves(
    ax: Axes, curves: Mapping[str, Any], panel: str | int, rows: Sequence[TableRow]
) -> None:
    """Draw the curves of one panel, each pair of figures in its colour.

    A curve's label has the curve's name, unless that is the panel's title already.
    """
    names = dict.fromkeys(row.labels[curves["curve"]] for row in rows)
    lines = []
    for name in names:
        for pair in curves["figures"].items():
            lines.append((name, pair))

    for colour, (name, pair) in zip(colours(len(lines)), lines, strict=True):
        words = []
        if str(name) != str(panel):
            words.append(str(name))
        if len(curves["figures"]) > 1:
            words.append(pair[1].replace("_", " "))

        curve = [row for row in rows if row.labels[curves["curve"]] == name]
        x = [row.labels[curves["x"]] for row in curve]
        points = _heights(curve, "published", pair[0])
        ax.plot(x, points, "o", color=colour, alpha=0.8)

        line = _heights(curve, "analytic", pair[1])
        ax.plot(x, line, "-", color=colour, alpha=0.8, label=", ".join(words))


def _heights(rows: Sequence[TableRow], column: str, name: str) -> list[float]:
    """Return the figure ``name`` of each row; NaN, which matplotlib leaves out, if not a number."""
    heights = []
    for row in rows:
        value = getattr(row, column).get(name)
        if not isinstance(value, float | int):
            value = float("nan")
        heights.append(value)
    return heights
