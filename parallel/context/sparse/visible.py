"""Which rows of a set of tokens are seen by another set's.

Two pieces of one document and stride compare by two integers: query i of the one sees keys i + e .. i + d of the other,
so what is seen of a piece is one interval. All pieces of all ranks are compared at once.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from parallel.context.mask import Reach
from parallel.context.tiles import Piece

AT_ONCE = 1 << 16
"""Pairs of pieces; enough that numpy's calls cost little, and few enough for a cache."""
FAR = 1 << 40


class Seen(NamedTuple):
    """Rows ``first`` to ``end`` of the set ``whose`` that the set ``who`` sees: int64 ``[n]`` each, in no order."""

    who: np.ndarray
    whose: np.ndarray
    first: np.ndarray
    end: np.ndarray


class Pieces(NamedTuple):
    """Pieces of documents and the sets, such as places, that hold them: int64 ``[pieces]`` each."""

    place: np.ndarray
    start: np.ndarray
    length: np.ndarray
    document: np.ndarray  # -1: padding
    offset: np.ndarray  # what the first row is called in ``Seen``

    def take(self, index: np.ndarray) -> "Pieces":
        """Return the pieces at ``index``, in that order."""
        return Pieces(*(field[index] for field in self))


def as_columns(sets: Sequence[list[Piece]]) -> Pieces:
    """Return the pieces of some sets, whose rows are called by their offsets."""
    place = np.repeat(np.arange(len(sets)), [len(pieces) for pieces in sets])
    rows = np.array([piece for pieces in sets for piece in pieces], dtype=np.int64).reshape(-1, len(Piece._fields))
    return Pieces(place=place, **dict(zip(Piece._fields, rows.T.copy(), strict=True)))


def rows_seen(queries: Pieces, keys: Pieces, stride: int, reach: Reach) -> Seen:
    """Return the rows of each set of keys that some of each set of queries see.

    Which queries see some of the keys is the same question with the sets and the reach, (ahead, behind), exchanged.
    """
    pairs = _pairs(queries.document, keys.document)
    found = [_seen(queries, keys, *some, stride, reach) for some in pairs]
    return Seen(*(np.concatenate(column) for column in zip(*found, strict=True)))


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
    """Return the columns of ``Seen`` for pairs of pieces."""
    behind, ahead = reach
    gap = reader.start[query] - read.start[key]
    nearest = np.full_like(gap, -FAR) if behind is None else -((behind - gap) // stride)
    farthest = np.full_like(gap, FAR) if ahead is None else (gap + ahead) // stride
    first = np.maximum(nearest, 0)
    end = np.minimum(read.length[key], reader.length[query] + farthest)
    some = (first < end) & (nearest <= farthest)
    query, key = query[some], key[some]
    return reader.place[query], read.place[key], read.offset[key] + first[some], read.offset[key] + end[some]
