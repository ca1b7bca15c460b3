"""Draw the segments of packed documents on every rank, and what a delta rule passes between them."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from parallel.context import Plan
from parallel.context.linear.segments import chains
from tools.pictures import FAINT, INK, PALETTE
from tools.pictures.layouts import ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HIGH, HALO = 0.56, 3
"""Height of a segment, and tokens before it that a convolution of four taps reads."""


def draw(plans: dict[str, Plan]) -> "Figure":
    """Draw a panel per plan, by its title: ranks below each other, a document's segments in one colour.

    Arrows are states; the mark at the left of a segment is the halo, which comes the same way.

    Raises:
        ContextError: as ``chains``.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    some = next(iter(plans.values()))
    figure = Figure(figsize=(9, (0.5 * some.size + 0.9) * len(plans) + 0.7), layout="constrained")
    panels = figure.subplots(len(plans), sharex=True, squeeze=False)[:, 0]
    for axes, (title, plan) in zip(panels, plans.items(), strict=True):
        axes.set_title(title, loc="left", size=10, color=INK)
        _panel(axes, plan)
    axes.set_xlabel("position in the sequence", color=FAINT)
    drawn = axes.plot([], [], color=INK, marker=">", markersize=4, label="state")
    halo = Patch(facecolor="white", edgecolor=INK, hatch="/////", linewidth=0.5, label="halo of the convolution")
    figure.legend(handles=[*drawn, halo], loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def _panel(axes: "Axes", plan: Plan) -> None:
    cut = 0
    for number, chain in enumerate(chain for chain in chains(plan) if chain[0].start < plan.seq_len):
        colour = PALETTE[number % len(PALETTE)]
        cut += len(chain) > 1
        for segment in chain:
            axes.barh(segment.rank, segment.length, HIGH, segment.start, color=colour, edgecolor="white")
        longest = max(chain, key=lambda segment: segment.length)
        middle = longest.start + longest.length / 2
        name: dict[str, Any] = {"ha": "center", "va": "center", "size": 8, "color": ink_on(colour)}
        axes.text(middle, longest.rank, chr(ord("A") + number % 26), **name)
        for one, other in pairwise(chain):
            _passed(axes, one.start + one.length, one.rank, other.rank)
    axes.set(ylim=(plan.size - 0.5, -0.5), xlim=(0, plan.seq_len))
    axes.set_yticks(range(plan.size), [f"rank {rank}" for rank in range(plan.size)], size=8, color=INK)
    axes.tick_params(length=0, colors=FAINT)
    axes.spines[:].set_visible(False)
    documents = len(plan.documents or (0, 0)) - 1
    axes.set_title(f"{cut} of {documents} documents cut", loc="right", size=8, color=FAINT)


def _passed(axes: "Axes", position: int, source: int, target: int) -> None:
    """Draw the halo of the segment that begins at a position, and the state that enters it."""
    halo: Any = {"color": "white", "edgecolor": INK, "hatch": "/////", "linewidth": 0.5, "zorder": 3}
    axes.barh(target, HALO, HIGH, position - HALO, **halo)
    if source != target:
        way = 1 if target > source else -1
        start, end = (position, source + way * HIGH / 2), (position, target - way * HIGH / 2)
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2}, zorder=4)
