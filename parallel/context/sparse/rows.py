"""Sets of rows (sorted intervals), and the computation of which rows queries see.

A set is ascending, disjoint, non-adjacent intervals [first, end); the rows of all owners lie on one
line of numbers. With a hundred documents and a thousand ranks there are millions of intervals, so a
set is two numpy arrays, and union and intersection take one sort each. Python objects appear only
for the few rows of one rank.

Two integers compare two pieces of one document and stride: query i of one piece sees keys i + e to
i + d of the other, so the visible rows of a piece are one interval. All pieces of all ranks are
compared at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from parallel.context.layout import Reach
from parallel.context.tiles import Piece

AT_ONCE = 1 << 16
"""Number of pairs of pieces compared at once: enough that numpy's calls cost little, and few enough
for a processor's cache."""
FAR = 1 << 40

Rows: TypeAlias = tuple[tuple[int, int], ...]
"""A few rows of one buffer, as intervals [first, end)."""


class Spans(NamedTuple):
    """Many rows, as arrays of intervals: int64 ``[n]`` each."""

    first: np.ndarray
    end: np.ndarray

    def where(self, chosen: np.ndarray | slice) -> "Spans":
        """Return the chosen intervals."""
        return Spans(self.first[chosen], self.end[chosen])


NOWHERE = Spans(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def count(rows: Rows) -> int:
    """Count the rows."""
    return sum(end - first for first, end in rows)


def merged(intervals: Iterable[tuple[int, int]]) -> Rows:
    """Join intervals that overlap or adjoin; they must ascend by their first rows."""
    joined: list[tuple[int, int]] = []
    for first, end in intervals:
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return tuple(joined)


def indices_in(part: Rows, stored: Rows, offset: int = 0) -> Rows:
    """Return the indices of the rows ``part`` in a buffer that holds the rows ``stored``.

    The stored rows lie in the buffer from ``offset`` on, one after the other, without gaps.
    """
    indices = []
    index = 0  # number of the stored interval that begins at ``offset`` in the buffer

    for first, end in part:
        while stored[index][1] <= first:
            offset += stored[index][1] - stored[index][0]
            index += 1

        shift = offset - stored[index][0]
        indices.append((first + shift, end + shift))
    return merged(indices)


ByPlace = dict[int, Rows]
"""Rows keyed by place, in ascending order of places; for example a buffer of rows of several
owners, in this order.
"""


def length_of(buffer: ByPlace) -> int:
    """Count the rows of all places."""
    return sum(map(count, buffer.values()))


def indices_by_place(buffer: ByPlace, rows: ByPlace) -> ByPlace:
    """Return the buffer indices of each place's rows, keyed by place."""
    starts = accumulate(map(count, buffer.values()), initial=0)
    offsets = dict(zip(buffer, starts, strict=False))
    return {place: indices_in(part, buffer[place], offsets[place]) for place, part in rows.items()}


def union(*several: Spans) -> Spans:
    """Return the rows that are in at least one set; intervals may overlap and be in any order.

    The first rows and the ends can be sorted separately, as in a sweep along the line, because it
    matters only how many intervals are open, not which.
    """
    first, end = _sorted(*several)
    if not len(first):
        return NOWHERE
    # Before first[k + 1], k + 1 intervals have begun. If as many have ended, none is open: there is
    # a gap.
    gap = first[1:] > end[:-1]
    return Spans(first[np.append(True, gap)], end[np.append(gap, True)])


def common(a: Spans, b: Spans) -> Spans:
    """Return the rows that are in both sets.

    At most one interval of each set is open at a time. After sorting, ``first[k + 1]`` opens the
    (k + 2)-th interval. If it lies before ``end[k]``, only k intervals have ended, so two are open,
    one of each set, until ``end[k]``.
    """
    first, end = _sorted(a, b)
    return Spans(first[1:], end[:-1]).where(first[1:] < end[:-1])


def without(a: Spans, b: Spans) -> Spans:
    """Return the rows of ``a`` that are not in ``b``.

    They are the rows that are in both ``a`` and the gaps of ``b``.
    """
    if not len(a.first) or not len(b.first):
        return a

    below = min(a.first[0], b.first[0]) - 1
    above = max(a.end[-1], b.end[-1]) + 1
    complement = Spans(np.append(below, b.end), np.append(b.first, above))
    return common(a, complement)


def _sorted(*several: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return all first rows sorted, and all ends sorted."""
    present = [spans for spans in several if len(spans.first)] or [NOWHERE]
    first = np.sort(np.concatenate([spans.first for spans in present]))
    end = np.sort(np.concatenate([spans.end for spans in present]))
    return first, end


class Line:
    """Numbering of the rows of all owners at all places, so that one set can hold them all.

    Row i of owner o, stored at place p, has number (p * places + o) * (rows + 1) + i. One unused
    number in between keeps the intervals of different places and owners from joining.
    """

    def __init__(self, num_places: int, num_rows: int) -> None:
        """``num_rows`` is the number of rows of each owner."""
        self.num_places = num_places
        self._pair_size = num_rows + 1

    def spans(
        self, place: np.ndarray, owner: np.ndarray, first: np.ndarray, end: np.ndarray
    ) -> Spans:
        """Return the numbers of rows ``[first, end)`` of ``owner`` at ``place``, in that order."""
        start = (place * self.num_places + owner) * self._pair_size
        return Spans(start + first, start + end)

    def pairs(self, spans: Spans) -> np.ndarray:
        """Return place * num_places + owner for each interval."""
        return spans.first // self._pair_size

    def moved(self, spans: Spans, to: np.ndarray) -> Spans:
        """Renumber the rows of every place p as rows of place ``to[p]``; the result is unsorted."""
        place = self.pairs(spans) // self.num_places
        shift = (to[place] - place) * (self.num_places * self._pair_size)
        return Spans(spans.first + shift, spans.end + shift)

    def at(self, place: int, spans: Spans) -> ByPlace:
        """Return the rows that one place holds, keyed by owner."""
        place_size = self.num_places * self._pair_size
        bounds = (place * place_size, (place + 1) * place_size)

        # Spans ascend, so those of one place are adjacent.
        low, high = spans.first.searchsorted(bounds).tolist()
        local = spans.where(slice(low, high))
        return self._split(local, self.pairs(local) - place * self.num_places)

    def of(self, owner: int, spans: Spans) -> ByPlace:
        """Return the rows of one owner, keyed by the place that holds them."""
        pairs = self.pairs(spans)
        chosen = np.flatnonzero(pairs % self.num_places == owner)
        return self._split(spans.where(chosen), pairs[chosen] // self.num_places)

    def _split(self, spans: Spans, names: np.ndarray) -> ByPlace:
        """Return the rows keyed by ``names``, which must ascend."""
        if not len(names):
            return {}
        start = self.pairs(spans) * self._pair_size
        firsts = (spans.first - start).tolist()
        ends = (spans.end - start).tolist()

        by_name: dict[int, list[tuple[int, int]]] = {}
        for name, first, end in zip(names.tolist(), firsts, ends, strict=True):
            by_name.setdefault(name, []).append((first, end))
        return {name: tuple(rows) for name, rows in by_name.items()}


class Pieces(NamedTuple):
    """Pieces of documents, and the sets (such as places) that hold them: int64 ``[pieces]``."""

    place: np.ndarray
    start: np.ndarray
    length: np.ndarray
    document: np.ndarray  # -1: padding
    offset: np.ndarray  # index of its first row in the set

    def take(self, index: np.ndarray) -> "Pieces":
        """Return the pieces at ``index``, in that order."""
        return Pieces(*(field[index] for field in self))


def as_columns(sets: Sequence[list[Piece]]) -> Pieces:
    """Return the pieces of several sets as columns; a set's rows are numbered by their offsets."""
    place = np.repeat(np.arange(len(sets)), [len(pieces) for pieces in sets])
    all_pieces = [piece for pieces in sets for piece in pieces]
    table = np.array(all_pieces, dtype=np.int64).reshape(-1, len(Piece._fields))
    columns = dict(zip(Piece._fields, table.T.copy(), strict=True))
    return Pieces(place=place, **columns)


def rows_seen(queries: Pieces, keys: Pieces, stride: int, reach: Reach) -> tuple[np.ndarray, ...]:
    """Return the key rows that queries see, for each pair of a query set and a key set.

    The rows are unsorted, for ``Line.spans``. To find the query rows that see some key instead,
    exchange the two arguments and reverse the reach.

    Returns:
        for each interval of rows, the set that sees it, the set that has it, its first row and its
        end: int64 ``[n]`` each.
    """
    parts = []
    for query_index, key_index in _pairs(queries.document, keys.document):
        parts.append(_seen(queries, keys, query_index, key_index, stride, reach))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _pairs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield index pairs of equal documents in ``a`` and ``b``, about ``AT_ONCE`` at a time."""
    # For element i of ``a``, the matches are order[low[i]:high[i]].
    order = np.argsort(b, kind="stable")
    low = np.searchsorted(b[order], a, "left")
    high = np.searchsorted(b[order], a, "right")
    num_matches = high - low

    # Cut ``a`` where the number of pairs passes a multiple of AT_ONCE.
    before = np.cumsum(num_matches) - num_matches
    num_pairs = before[-1] + 1 if len(a) else 0
    cuts = np.searchsorted(before, np.arange(AT_ONCE, num_pairs, AT_ONCE))

    for part in np.split(np.arange(len(a)), cuts):
        a_index = np.repeat(part, num_matches[part])
        nth_match = np.arange(len(a_index)) + before[part[:1]] - before[a_index]
        yield a_index, order[low[a_index] + nth_match]


def _seen(
    reader: Pieces, read: Pieces, query: np.ndarray, key: np.ndarray, stride: int, reach: Reach
) -> tuple[np.ndarray, ...]:
    """Compute the columns of ``rows_seen`` for pairs of pieces.

    Query i of a piece sees keys i + nearest to i + farthest. So all queries of the piece together
    see the keys from the nearest of its first query to the farthest of its last query.

    Args:
        reader, read: pieces of queries and of keys.
        query, key: their indices, int64 ``[pairs]``.
    """
    behind, ahead = reach
    gap = reader.start[query] - read.start[key]
    nearest = np.full_like(gap, -FAR) if behind is None else -((behind - gap) // stride)
    farthest = np.full_like(gap, FAR) if ahead is None else (gap + ahead) // stride
    first = np.maximum(nearest, 0)
    end = np.minimum(read.length[key], reader.length[query] + farthest)

    sees_any = (first < end) & (nearest <= farthest)
    query = query[sees_any]
    key = key[sees_any]
    offset = read.offset[key]
    return (
        reader.place[query],
        read.place[key],
        offset + first[sees_any],
        offset + end[sees_any],
    )
