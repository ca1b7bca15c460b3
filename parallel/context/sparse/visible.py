"""Which rows of a set of tokens are seen by, or see, another set's.

Two pieces of one document and stride compare by two integers: query i of the one sees keys i + e .. i + d of the other,
so what is seen of a piece is one interval. All pieces of all ranks are compared at once.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from parallel.context.mask import Reach
from parallel.context.sparse.rows import Rows, merged
from parallel.context.tiles import Piece

Table = dict[tuple[int, int], Rows]
"""Rows by (who sees or is seen, whose rows); pairs without any are left out."""


class _Pieces(NamedTuple):
    """Pieces of several sets, one entry each."""

    owner: np.ndarray
    start: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    document: np.ndarray


def seen_keys(queries: Sequence[list[Piece]], keys: Sequence[list[Piece]], stride: int, reach: Reach) -> Table:
    """Return for (set of queries, set of keys) the rows of the keys that some of these queries see."""
    reader, read = _pairs(_flat(queries), _flat(keys))
    nearest, farthest = _offsets(reader, read, stride, reach)
    first = np.maximum(nearest, 0)
    end = np.minimum(read.length, reader.length + farthest)
    return _table(reader.owner, read, first, np.where(nearest <= farthest, end, first))


def seeing_queries(queries: Sequence[list[Piece]], keys: Sequence[list[Piece]], stride: int, reach: Reach) -> Table:
    """Return for (set of keys, set of queries) the rows of the queries that see some of these keys."""
    reader, read = _pairs(_flat(queries), _flat(keys))
    nearest, farthest = _offsets(reader, read, stride, reach)
    first = np.maximum(-farthest, 0)
    end = np.minimum(reader.length, read.length - nearest)
    return _table(read.owner, reader, first, np.where(nearest <= farthest, end, first))


def _flat(sets: Sequence[list[Piece]]) -> _Pieces:
    owners = np.repeat(np.arange(len(sets)), [len(pieces) for pieces in sets])
    rows = np.array([piece for pieces in sets for piece in pieces], dtype=np.int64).reshape(-1, len(Piece._fields))
    by_name = dict(zip(Piece._fields, rows.T, strict=True))
    return _Pieces(owners, *(by_name[name] for name in _Pieces._fields[1:]))


def _pairs(a: _Pieces, b: _Pieces) -> tuple[_Pieces, _Pieces]:
    """Pair every piece of ``a`` with those of ``b`` in the same document."""
    order = np.argsort(b.document, kind="stable")
    documents = b.document[order]
    low = np.searchsorted(documents, a.document, "left")
    counts = np.searchsorted(documents, a.document, "right") - low
    left = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    right = order[np.repeat(low, counts) + within]
    return _Pieces(*(column[left] for column in a)), _Pieces(*(column[right] for column in b))


def _offsets(reader: _Pieces, read: _Pieces, stride: int, reach: Reach) -> tuple[np.ndarray, np.ndarray]:
    """Return e and d: query i sees keys i + e .. i + d, as indices in the two pieces."""
    behind, ahead = reach
    gap = reader.start - read.start
    everything = reader.length + read.length
    nearest = -everything if behind is None else -((behind - gap) // stride)
    farthest = everything if ahead is None else (gap + ahead) // stride
    return nearest, farthest


def _table(who: np.ndarray, whose: _Pieces, first: np.ndarray, end: np.ndarray) -> Table:
    some = first < end
    first, end = (whose.offset + first)[some], (whose.offset + end)[some]
    who, owner = who[some], whose.owner[some]
    order = np.lexsort((first, owner, who))
    keys = np.stack((who[order], owner[order]), axis=1)
    starts = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1 if len(keys) else np.empty(0, dtype=np.int64)
    intervals = list(zip(first[order].tolist(), end[order].tolist(), strict=True))
    bounds = [0, *starts.tolist(), len(intervals)]
    pairs = keys.tolist()
    return {(pairs[a][0], pairs[a][1]): merged(intervals[a:b]) for a, b in pairwise(bounds) if a < b}
