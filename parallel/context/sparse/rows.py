"""Sets of rows, and which of them queries see.

A set is ascending, disjoint, non-adjacent intervals [first, end); those of all owners lie on one
line of numbers.

Two pieces of one document and stride compare by two integers: query i of the one sees keys i + e ..
i + d of the other, so what is seen of a piece is one interval. All pieces of all ranks are compared
at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from parallel.context.layout import Reach
from parallel.context.tiles import Piece

AT_ONCE = 1 << 16
"""Pairs of pieces; enough that numpy's calls cost little, and few enough for a cache."""
FAR = 1 << 40

Rows: TypeAlias = tuple[tuple[int, int], ...]
"""A few rows, of one buffer."""


class Spans(NamedTuple):
    """Many rows: int64 ``[n]`` each."""

    first: np.ndarray
    end: np.ndarray

    def where(self, chosen: np.ndarray | slice) -> "Spans":
        """Return some of the intervals."""
        return Spans(self.first[chosen], self.end[chosen])


NOWHERE = Spans(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def count(rows: Rows) -> int:
    """Count the rows."""
    return sum(end - first for first, end in rows)


def merged(intervals: Iterable[tuple[int, int]]) -> Rows:
    """Join intervals, in ascending order of their first rows, that overlap or adjoin."""
    found: list[tuple[int, int]] = []
    for first, end in intervals:
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def places_in(part: Rows, kept: Rows, offset: int = 0) -> Rows:
    """Return where ``part`` of the rows ``kept`` lies in a buffer that holds them from ``offset``
    on.
    """
    found, at, j = [], offset, 0
    for first, end in part:
        while kept[j][1] <= first:
            at += kept[j][1] - kept[j][0]
            j += 1
        found.append((at + first - kept[j][0], at + end - kept[j][0]))
    return merged(found)


ByPlace = dict[int, Rows]
"""Rows by place, in ascending order of places; such as a buffer of those of some owners, in this
order.
"""


def length_of(buffer: ByPlace) -> int:
    """Count the rows of all places."""
    return sum(map(count, buffer.values()))


def found_in(buffer: ByPlace, wanted: ByPlace) -> ByPlace:
    """Return where each place's wanted rows lie in the buffer."""
    offsets = dict(zip(buffer, accumulate(map(count, buffer.values()), initial=0), strict=False))
    return {place: places_in(rows, buffer[place], offsets[place]) for place, rows in wanted.items()}


def union(*several: Spans) -> Spans:
    """Return the rows that are in any set; the intervals given may overlap and be in any order."""
    first, end = _sorted(*several)
    if not len(first):
        return NOWHERE
    apart = first[1:] > end[:-1]  # k + 1 have begun and as many ended: nothing is open
    return Spans(first[np.append(True, apart)], end[np.append(apart, True)])


def common(a: Spans, b: Spans) -> Spans:
    """Return the rows of both sets.

    Of each set at most one interval is open at a time. Sorted, the first row ``first[k + 1]`` opens
    interval k + 2; if that is before ``end[k]``, only k have ended, so that two are open, one of
    each set, until ``end[k]``.
    """
    first, end = _sorted(a, b)
    return Spans(first[1:], end[:-1]).where(first[1:] < end[:-1])


def without(a: Spans, b: Spans) -> Spans:
    """Return the rows of ``a`` that are not in ``b``."""
    if not len(a.first) or not len(b.first):
        return a
    least, most = min(a.first[0], b.first[0]) - 1, max(a.end[-1], b.end[-1]) + 1
    return common(a, Spans(np.append(least, b.end), np.append(b.first, most)))


def _sorted(*several: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return all first rows in order, and all ends."""
    present = [spans for spans in several if len(spans.first)] or [NOWHERE]
    return np.sort(np.concatenate([x.first for x in present])), np.sort(
        np.concatenate([x.end for x in present])
    )


class Line:
    """Row i of what place p holds of owner o has number (p * places + o) * (rows + 1) + i.

    One number in between keeps the intervals of different places and owners apart.
    """

    def __init__(self, places: int, rows: int) -> None:
        """``rows`` are those of each owner."""
        self.places, self._each = places, rows + 1

    def spans(
        self, place: np.ndarray, owner: np.ndarray, first: np.ndarray, end: np.ndarray
    ) -> Spans:
        """Return the rows ``[first, end)`` of ``owner`` at ``place``, in the order given."""
        start = (place * self.places + owner) * self._each
        return Spans(start + first, start + end)

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
        low, high = spans.first.searchsorted(
            (place * all_owners, (place + 1) * all_owners)
        ).tolist()
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


class Pieces(NamedTuple):
    """Pieces of documents and the sets, such as places, that hold them: int64 ``[pieces]`` each."""

    place: np.ndarray
    start: np.ndarray
    length: np.ndarray
    document: np.ndarray  # -1: padding
    offset: np.ndarray  # number of its first row in the set

    def take(self, index: np.ndarray) -> "Pieces":
        """Return the pieces at ``index``, in that order."""
        return Pieces(*(field[index] for field in self))


def as_columns(sets: Sequence[list[Piece]]) -> Pieces:
    """Return the pieces of some sets, whose rows are called by their offsets."""
    place = np.repeat(np.arange(len(sets)), [len(pieces) for pieces in sets])
    rows = np.array([piece for pieces in sets for piece in pieces], dtype=np.int64).reshape(
        -1, len(Piece._fields)
    )
    return Pieces(place=place, **dict(zip(Piece._fields, rows.T.copy(), strict=True)))


def rows_seen(queries: Pieces, keys: Pieces, stride: int, reach: Reach) -> tuple[np.ndarray, ...]:
    """Return the rows of each set of keys that some of each set of queries see, in no order, for
    ``Line.spans``.

    Which queries see some of the keys is the same question with the sets and the reach, (ahead,
    behind), exchanged.

    Returns:
        the set that sees, the set seen, and of that the first row and the end: int64 ``[n]`` each.
    """
    pairs = _pairs(queries.document, keys.document)
    found = [_seen(queries, keys, *some, stride, reach) for some in pairs]
    return tuple(np.concatenate(column) for column in zip(*found, strict=True))


def _pairs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices of equal documents in ``a`` and ``b``, about ``AT_ONCE`` at a time."""
    order = np.argsort(b, kind="stable")
    low, high = (np.searchsorted(b[order], a, side) for side in ("left", "right"))
    before = np.cumsum(high - low) - (high - low)
    cuts = np.searchsorted(before, np.arange(AT_ONCE, before[-1] + 1 if len(a) else 0, AT_ONCE))
    for part in np.split(np.arange(len(a)), cuts):
        left = np.repeat(part, (high - low)[part])
        within = np.arange(len(left)) + before[part[:1]] - before[left]
        yield left, order[low[left] + within]


def _seen(
    reader: Pieces, read: Pieces, query: np.ndarray, key: np.ndarray, stride: int, reach: Reach
) -> tuple[np.ndarray, ...]:
    """Return the columns of ``rows_seen`` for pairs of pieces."""
    behind, ahead = reach
    gap = reader.start[query] - read.start[key]
    nearest = np.full_like(gap, -FAR) if behind is None else -((behind - gap) // stride)
    farthest = np.full_like(gap, FAR) if ahead is None else (gap + ahead) // stride
    first = np.maximum(nearest, 0)
    end = np.minimum(read.length[key], reader.length[query] + farthest)
    some = (first < end) & (nearest <= farthest)
    query, key = query[some], key[some]
    return (
        reader.place[query],
        read.place[key],
        read.offset[key] + first[some],
        read.offset[key] + end[some],
    )
