"""Draw how the layout ``balanced`` divides packed documents: circles, cut in two and closed to circles again.

Areas are true to scale, in all circles: that of a disc is its tokens, that of its rim the work of these tokens.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel.context.arcs import transfers
from runtime.words import counted
from tools.pictures import FAINT, INK, colour, faded, frameless, letter
from tools.pictures.discs import Disc, Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RADIUS = 1.12  # inches, of the circle of all documents
RIM = 1.42  # times a disc's radius where a token has the most work
LEAST_WIDTH, MARGIN, GAP, HEAD, TEXT, FOOT = 10.4, 0.35, 0.85, 1.72, 2.75, 2.2  # inches; GAP is between columns
LEAST_LABEL = 0.17  # inches of a document on its circle that a letter needs
Point = tuple[float, float]


class Page:
    """Where discs stand on the figure, in inches from its lower left corner."""

    def __init__(self, shown: Drawing) -> None:
        self._shown, size = shown, len(shown.leaves)
        self.tall = max(size * (2 * RIM * _radius(shown, range(1)) + 0.16), 2 * RIM * RADIUS)
        radii = [RIM * max(_radius(shown, disc.ranks) for disc in column) for column in shown.columns]
        right = np.cumsum([2 * radius + GAP for radius in radii]) + MARGIN - GAP
        self.middles = [float(x - radius) for x, radius in zip(right, radii, strict=True)]
        self.text = float(right[-1]) + 0.25
        self.width, self.height = max(self.text + TEXT + MARGIN, LEAST_WIDTH), HEAD + self.tall + FOOT

    def centre(self, column: int, ranks: range) -> Point:
        """Return the centre of a disc."""
        middle = (ranks.start + ranks.stop) / 2 / len(self._shown.leaves)
        return self.middles[column], self.height - HEAD - self.tall * middle


def draw(shown: Drawing) -> "Figure":
    """Draw a column of circles for each level, words for each rank, and the sequence below."""
    from matplotlib.figure import Figure

    page, last = Page(shown), len(shown.columns) - 1
    figure = Figure(figsize=(page.width, page.height), facecolor="white", layout=None)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, page.width), ylim=(0, page.height))
    axes.set_axis_off()
    _words(axes, shown, page)
    for column, discs in enumerate(shown.columns):
        for disc in discs:
            if column < last and len(disc.ranks) == 1:
                continue  # stands among the ranks
            centre = page.centre(column, disc.ranks)
            _disc(axes, shown, disc, centre)
            for ranks, side in zip(disc.parts, (1, -1), strict=True):
                if column < last:
                    target = page.centre(column + 1 if len(ranks) > 1 else last, ranks)
                    _onward(axes, shown, (centre, disc.ranks), (target, ranks), side)
            if column == last:
                _share(axes, shown, disc, (page.text, centre[1]))
    _sequence(figure, shown)
    return figure


def _words(axes: "Axes", shown: Drawing, page: Page) -> None:
    """Write the title, what areas mean, and a heading above each column."""
    layout, size = shown.layout, len(shown.leaves)
    mask = ("causal" if layout.causal else "full") + (" mask" if layout.window is None else " mask and a window")
    title = f"Packed documents over {counted(size, 'rank')}: the same tokens and the same work for each"
    axes.text(MARGIN, page.height - 0.38, title, size=15, weight="bold", color=INK, va="center")
    facts = (
        f"{counted(len(layout.documents) - 1, 'document')} of {layout.real:,} tokens, {mask}. "
        "The area of a disc is its tokens; the area of its rim is their work, the keys that they see."
    )
    axes.text(MARGIN, page.height - 0.72, facts, size=9, color=FAINT, va="center")
    outside, inside = (len(ranks) for ranks in shown.columns[0][0].parts)
    if inside == outside:
        below = (
            "A cut through the middle halves the disc, however it is turned.\nTurn it until it halves the rim as well. "
        )
        below += "There is such a place:\nafter half a turn the two sides have changed places."
    else:
        below = f"A cut of {outside} : {inside} takes as much of the disc, however it is turned.\n"
        below += "Turn it until it takes as much of the rim, too. There is such a place:\n"
        below += "on average over a turn it does."
    last = len(shown.columns)
    heads = [("1  Put all documents on a circle", below)]
    heads += [(f"{n}  Close each part", "and cut it in the same way.") for n in range(2, last)]
    heads.append((f"{last}  One for each rank", ""))
    for index, (x, (head, text)) in enumerate(zip(page.middles, heads, strict=True)):
        left, side = (x, "center") if index else (MARGIN, "left")
        axes.text(left, page.height - 1.08, head, size=10, weight="bold", color=INK, ha=side, va="top")
        axes.text(left, page.height - 1.3, text, size=8.5, color=FAINT, linespacing=1.3, ha=side, va="top")


def _disc(axes: "Axes", shown: Drawing, disc: Disc, centre: Point) -> None:
    """Draw a disc and its rim in the colour of the first rank of each part; white lines part documents."""
    from matplotlib.patches import Polygon, Wedge

    radius, scale = _radius(shown, disc.ranks), (RIM**2 - 1) / max(shown.most, 1)
    colours = [colour(ranks.start if ranks else disc.ranks.start, len(shown.leaves)) for ranks in disc.parts]
    low, high = disc.cuts or (0, 0)
    for face, first, end in zip(colours, (high, low), (low + disc.size, high), strict=True):
        ends = np.degrees(disc.angle([end, first]))
        axes.add_patch(Wedge(centre, radius, *ends, facecolor=faded(face), linewidth=0))
    for stretch in disc.stretches:
        steps = np.linspace(0, stretch.end - stretch.first, 2 + 360 * (stretch.end - stretch.first) // disc.size)
        outer = radius * np.sqrt(1 + scale * np.maximum(stretch.work + stretch.slope * steps, 0))
        turned = disc.angle(stretch.first + steps)
        rim = np.stack(
            [*_at(centre, np.append(outer, np.full_like(outer, radius)), np.append(turned, turned[::-1]))], 1
        )
        face = colours[stretch.part]
        axes.add_patch(Polygon(rim, closed=True, facecolor=face, edgecolor=face, linewidth=0.3))
    edges = np.cumsum(disc.beads.length) - disc.beads.length
    begins = edges[disc.beads.document != np.roll(disc.beads.document, 1)] if shown.lettered else []
    for first in begins:  # of many documents, lines would hide the rims
        axes.plot(*_at(centre, radius * np.array([0.74, RIM]), disc.angle(first)), color="white", linewidth=0.9)
    for document, first, end in disc.joined:
        if shown.lettered and document >= 0 and 2 * np.pi * radius * (end - first) / disc.size > LEAST_LABEL:
            at = _at(centre, 0.87 * radius, disc.angle((first + end) / 2))
            axes.text(*at, letter(document), size=7.5, color=INK, ha="center", va="center")
    _names(axes, disc, centre, radius)


def _names(axes: "Axes", disc: Disc, centre: Point, radius: float) -> None:
    """Draw the cut, and name the ranks that each part is for."""
    if disc.cuts is None:
        name = str(disc.ranks.start)
        axes.text(*centre, name, size=11 + 4 * radius, weight="bold", color=INK, ha="center", va="center")
        return
    for turned in disc.angle(disc.cuts):
        axes.plot(*_at(centre, np.array([0, RIM * radius + 0.07]), turned), color=INK, linewidth=1.3)
    for ranks, side in zip(disc.parts, (0.3, -0.3), strict=True):
        at = centre[0], centre[1] + side * radius
        axes.text(*at, _named(ranks), size=6.5 + 2.6 * radius, weight="bold", color=INK, ha="center", va="center")


def _named(ranks: range) -> str:
    first, last = ranks.start, ranks.stop - 1
    if first == last:
        return f"rank {first}"
    return f"ranks {first}, {last}" if last == first + 1 else f"ranks {first} to {last}"


def _radius(shown: Drawing, ranks: range) -> float:
    """Return the radius of a disc for these ranks, in inches."""
    return RADIUS * float(len(ranks) / len(shown.leaves)) ** 0.5


def _at(centre: Point, away: Any, angle: Any) -> tuple[Any, Any]:
    """Return x and y of points so far from the centre, at these angles."""
    return centre[0] + away * np.cos(angle), centre[1] + away * np.sin(angle)


def _onward(axes: "Axes", shown: Drawing, start: tuple[Point, range], end: tuple[Point, range], side: int) -> None:
    """Lead from a part of a circle to the circle that it is closed to."""
    from matplotlib.patches import FancyArrowPatch

    (centre, whole), ((x, y), ranks) = start, end
    begin = _at(centre, RIM * _radius(shown, whole) + 0.05, side * np.pi / 5)
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    style |= {"connectionstyle": f"arc3,rad={-0.18 * side}", "color": colour(ranks.start, len(shown.leaves))}
    axes.add_patch(FancyArrowPatch(begin, (x - RIM * _radius(shown, ranks) - 0.17, y), **style))


def _share(axes: "Axes", shown: Drawing, disc: Disc, at: Point) -> None:
    """Say what a rank has got."""
    x, y = at
    total, lengths = sum(leaf.work for leaf in shown.leaves), np.diff(shown.layout.documents)
    real = disc.beads.document >= 0
    held = np.bincount(disc.beads.document[real], disc.beads.length[real], len(lengths))
    whole, parts = np.flatnonzero(held == lengths).tolist(), np.flatnonzero((held > 0) & (held < lengths)).tolist()
    words = [f"{len(whole):,} whole"] * bool(whole) + [f"part of {len(parts):,}"] * bool(parts)
    if shown.lettered:
        named = [("whole", whole), ("part of", parts)]
        words = [f"{word} {', '.join(map(letter, some))}" for word, some in named if some]
    axes.text(x, y + 0.2, f"rank {disc.ranks.start}", size=9.5, weight="bold", color=INK, va="center")
    facts = f"{disc.size:,} tokens, {disc.work / total:.1%} of the work"
    axes.text(x, y, facts, size=8.5, color=INK, va="center")
    axes.text(x, y - 0.19, "; ".join(words), size=8.5, color=FAINT, va="center")


def _sequence(figure: "Figure", shown: Drawing) -> None:
    """Draw the sequence as it lies, each token as high as its work, in the colour of its rank."""
    (width, height), most, layout = figure.get_size_inches(), shown.most, shown.layout
    wide = width - 2 * MARGIN
    axes = figure.add_axes((MARGIN / width, 0.72 / height, wide / width, 0.95 / height))
    for disc in shown.leaves:
        face = colour(disc.ranks.start, len(shown.leaves))
        for start, length, first, slope, _ in zip(*(field.tolist() for field in disc.beads), strict=True):
            ends = [start, start + length]
            axes.fill_between(ends, [first, max(first + (length - 1) * slope, 0)], color=face, linewidth=0)
            axes.fill_between(ends, -0.16 * most, -0.05 * most, color=face, linewidth=0)
    for document, (first, end) in enumerate(pairwise(layout.documents)):
        if shown.lettered:
            axes.vlines([first, end], -0.16 * most, 0, color="white", linewidth=1.2)
        if shown.lettered and (end - first) * wide / layout.seq_len > LEAST_LABEL / 2:
            at = (first + end) / 2, -0.3 * most
            axes.text(*at, letter(document), size=8, color=INK, ha="center", va="center")
    axes.set(xlim=(0, layout.seq_len), ylim=(-0.4 * most, 1.02 * most), yticks=[], xticks=[])
    frameless(axes)
    title = "The sequence as it lies: each token as high as the keys that it sees, in the colour of its rank"
    axes.set_title(title, size=10, weight="bold", color=INK, loc="left", pad=8)
    figure.text(MARGIN / width, 0.36 / height, _facts(shown), size=9, color=FAINT, va="center")


def _facts(shown: Drawing) -> str:
    """Return how much is cut, and what travels."""
    layout, pieces, rows = shown.layout, shown.layout.pieces(), transfers(shown.layout)
    count, sent = len(layout.documents) - 1, int((rows.end - rows.first).sum())
    shared = sum(len(np.unique(pieces.place[pieces.document == n])) > 1 for n in range(count))
    ring = sent / ((layout.places - 1) * layout.real)
    return (
        f"{2 * (layout.places - 1)} cuts, however many documents. {shared:,} of {counted(count, 'document')} "
        f"{'lies' if shared == 1 else 'lie'} on several ranks. All ranks together receive {counted(sent, 'row')} "
        f"of KV from others: {ring:.0%} of a ring's."
    )
