"""One line of numbers for the rows of all owners that all places hold, so that one sort handles them all."""

import numpy as np

from parallel.context.sparse.rows import Rows, Spans
from parallel.context.sparse.visible import Seen

ByPlace = dict[int, Rows]
"""Rows by place, in ascending order of places."""


class Line:
    """Row i of what place p holds of owner o has number (p * places + o) * (rows + 1) + i.

    One number in between keeps the intervals of different places and owners apart.
    """

    def __init__(self, places: int, rows: int) -> None:
        """``rows`` are those of each owner."""
        self.places, self._each = places, rows + 1

    def spans(self, place: np.ndarray, owner: np.ndarray, first: np.ndarray, end: np.ndarray) -> Spans:
        """Return the rows ``[first, end)`` of ``owner`` at ``place``, in the order given."""
        start = (place * self.places + owner) * self._each
        return Spans(start + first, start + end)

    def rows(self, spans: Spans) -> Seen:
        """Invert ``spans``."""
        pairs = self.pairs(spans)
        start = pairs * self._each
        return Seen(*np.divmod(pairs, self.places), spans.first - start, spans.end - start)

    def pairs(self, spans: Spans) -> np.ndarray:
        """Return place * places + owner of each interval."""
        return spans.first // self._each

    def moved(self, spans: Spans, to: np.ndarray) -> Spans:
        """Return what place p holds as held by place ``to[p]``, in no order."""
        place = self.pairs(spans) // self.places
        further = (to[place] - place) * (self.places * self._each)
        return Spans(spans.first + further, spans.end + further)

    def at(self, place: int, spans: Spans) -> ByPlace:
        """Return what one place holds, by owner."""
        all_owners = self.places * self._each
        low, high = spans.first.searchsorted((place * all_owners, (place + 1) * all_owners)).tolist()
        own = spans.where(slice(low, high))
        return self._split(own, self.pairs(own) - place * self.places)

    def of(self, owner: int, spans: Spans) -> ByPlace:
        """Return what is held of one owner's rows, by place."""
        pairs = self.pairs(spans)
        chosen = np.flatnonzero(pairs % self.places == owner)
        return self._split(spans.where(chosen), pairs[chosen] // self.places)

    def _split(self, spans: Spans, names: np.ndarray) -> ByPlace:
        """Return the rows of each of ``names``, which ascend."""
        if not len(names):
            return {}
        start = self.pairs(spans) * self._each
        found: dict[int, list[tuple[int, int]]] = {name: [] for name in names.tolist()}
        intervals = zip((spans.first - start).tolist(), (spans.end - start).tolist(), strict=True)
        for name, interval in zip(names.tolist(), intervals, strict=True):
            found[name].append(interval)
        return {name: tuple(rows) for name, rows in found.items()}
