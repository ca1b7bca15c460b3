"""The circles of the layout ``balanced``, level by level: what ``tools/pictures/arcs.py`` draws."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from parallel.context import ContextError, make_plan
from parallel.context.arcs import ArcLayout, levels
from parallel.context.arcs.circles import Beads, Circles, split

LETTERS = 26


class Stretch(NamedTuple):
    """Part of a bead, on one side of the cuts: part 0 lies outside of them, part 1 between."""

    document: int
    part: int
    first: int  # in tokens of the circle
    end: int
    work: int  # of its first token
    slope: int


@dataclass(frozen=True)
class Disc:
    """One circle: its beads, the ranks that it is for, and where it is cut, in tokens from its beginning."""

    beads: Beads
    ranks: range
    cuts: tuple[int, int] | None

    @property
    def size(self) -> int:
        """Return its tokens."""
        return int(self.beads.length.sum())

    @property
    def work(self) -> int:
        """Return its (query, key) pairs."""
        return int(self.beads.work(self.beads.length).sum())

    @property
    def parts(self) -> tuple[range, range]:
        """Return the ranks of part 0 and of part 1."""
        low, high = self.cuts or (0, 0)
        middle = self.ranks.stop - (high - low) * len(self.ranks) // self.size
        return range(self.ranks.start, middle), range(middle, self.ranks.stop)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """Return its beads, cut at its cuts."""
        low, high = self.cuts or (0, 0)
        found, begin = [], 0
        for _, length, work, slope, document in zip(*(field.tolist() for field in self.beads), strict=True):
            edges = [begin, *(cut for cut in (low, high) if begin < cut < begin + length), begin + length]
            for first, end in pairwise(edges):
                part = int(low <= first < high)
                found.append(Stretch(document, part, first, end, work + (first - begin) * slope, slope))
            begin += length
        return tuple(found)

    @property
    def joined(self) -> Iterator[tuple[int, int, int]]:
        """Yield (document, from, to) of what lies side by side of a document in one part."""
        for (document, _), group in groupby(self.stretches, lambda stretch: (stretch.document, stretch.part)):
            several = list(group)
            yield document, several[0].first, several[-1].end

    def angle(self, at: Any) -> Any:
        """Return the angle of places on the circle; clockwise, with the middle of part 0 at the top."""
        low, high = self.cuts or (0, 0)
        return np.pi / 2 - 2 * np.pi * (np.asarray(at) - (low + high) / 2 - self.size / 2) / self.size


@dataclass(frozen=True)
class Drawing:
    """What to draw: the discs of each column, those of single ranks last."""

    layout: ArcLayout
    columns: tuple[tuple[Disc, ...], ...]

    @property
    def leaves(self) -> tuple[Disc, ...]:
        """Return the disc of each rank."""
        return self.columns[-1]

    @cached_property
    def most(self) -> int:
        """Return the work of the token that has most."""
        return max(
            max(one.work, one.work + (one.end - one.first - 1) * one.slope) for one in self.columns[0][0].stretches
        )

    @property
    def lettered(self) -> bool:
        """Return whether there are letters enough for all documents."""
        return len(self.layout.documents) <= LETTERS + 1


def drawing(lengths: list[int], size: int, causal: bool = True, window: int | None = None) -> Drawing:
    """Divide documents of these lengths among ``size`` ranks; a token sees ``window`` others on a side.

    Raises ContextError: as ``make_plan``; or a single rank, for which nothing is cut.
    """
    if size < 2:
        raise ContextError(f"size is {size}: nothing is cut for a single rank; use 2 or more")
    documents = tuple(np.cumsum([0, *lengths]).tolist())
    reach = (window, 0 if causal else window) if window else None
    plan = make_plan(
        "exchange",
        seq_len=documents[-1],
        size=size,
        causal=causal,
        documents=documents,
        window=reach,
        layout="balanced",
    )
    layout = plan.layout
    assert isinstance(layout, ArcLayout)
    found = levels(layout)
    circles, cuts = found[-1]
    ranks = split(circles, cuts + circles.base[:, None])
    return Drawing(layout, (*(tuple(_discs(*level)) for level in found), tuple(_discs(ranks, None))))


def _discs(circles: Circles, cuts: np.ndarray | None) -> Iterator[Disc]:
    rank = 0
    for index, places in enumerate(circles.places.tolist()):
        beads = circles.beads.take(np.flatnonzero(circles.circle == index))
        cut = None if cuts is None or places == 1 else (int(cuts[index, 0]), int(cuts[index, 1]))
        yield Disc(beads, range(rank, rank + places), cut)
        rank += places
