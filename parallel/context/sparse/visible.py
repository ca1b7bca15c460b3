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


class _Pieces(NamedTuple):
    """Pieces of several sets, one entry each."""

    owner: np.ndarray
    start: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    document: np.ndarray


def rows_seen(queries: Sequence[list[Piece]], keys: Sequence[list[Piece]], stride: int, reach: Reach) -> Seen:
    """Return the rows of each set of keys that some of each set of queries see.

    Which queries see some of the keys is the same question with the sets and the reach, (ahead, behind), exchanged.
    """
    reader, read = _flat(queries), _flat(keys)
    found = [_seen(reader, read, *pairs, stride, reach) for pairs in _pairs(reader.document, read.document)]
    return Seen(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _flat(sets: Sequence[list[Piece]]) -> _Pieces:
    owners = np.repeat(np.arange(len(sets)), [len(pieces) for pieces in sets])
    rows = np.array([piece for pieces in sets for piece in pieces], dtype=np.int64).reshape(-1, len(Piece._fields))
    by_name = dict(zip(Piece._fields, rows.T.copy(), strict=True))
    return _Pieces(owners, *(by_name[name] for name in _Pieces._fields[1:]))


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
    reader: _Pieces, read: _Pieces, query: np.ndarray, key: np.ndarray, stride: int, reach: Reach
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
    return reader.owner[query], read.owner[key], read.offset[key] + first[some], read.offset[key] + end[some]
