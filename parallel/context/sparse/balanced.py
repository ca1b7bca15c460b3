"""The layout ``balanced``: every rank has the same tokens and the same work, whatever documents the
sequence packs.

Documents lie on a circle (``circles``) in any order: all are in balance, and some are cut at better
points than others.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from parallel.context.layout import Stride
from parallel.context.sparse.circles import Beads, Circles, halve
from parallel.context.sparse.rows import Line, Pieces, Spans, rows_seen, union

MOST_BEADS = 8_000
"""Documents in all orders that are tried together: above, fewer orders are. A thousand take about a
millisecond.
"""


@dataclass(frozen=True)
class ArcLayout:
    """``seq_len`` tokens in packed documents over ``size`` ranks, by arcs; see ``circles``.

    Args:
        seq_len: tokens, a multiple of ``size``.
        real: tokens that exist; padding, the rest, is no document's and has no work.
        size: ranks.
        team_size: neighbouring ranks that share a place, each a slice of its tokens.
        documents: cumulative lengths, ``(0, l1, l1 + l2, ..., real)``.
        causal: a token sees none behind it.
        window: how many tokens before and behind itself a token sees, besides itself: -1 for all of
            its document's.
    """

    seq_len: int
    real: int
    size: int
    team_size: int
    documents: tuple[int, ...]
    causal: bool = True
    window: tuple[int, int] | None = None

    name = "balanced"
    stride = 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Return the hash, taken once: it passes over all documents."""
        fields = (self.seq_len, self.real, self.size, self.team_size, self.causal)
        return hash((*fields, self.documents, self.window or ()))

    @property
    def places(self) -> int:
        """Return the number of places, each of ``team_size`` ranks."""
        return self.size // self.team_size

    @property
    def reach(self) -> tuple[int, int]:
        """Return how many tokens before and behind itself a token sees at most."""
        left, right = self.window or (-1, 0 if self.causal else -1)
        return (self.real if left < 0 else left, self.real if right < 0 else right)

    @cached_property
    def bounds(self) -> np.ndarray:
        """Return the documents' cumulative lengths: int64 ``[documents + 1]``."""
        return np.array(self.documents, dtype=np.int64)

    def pieces(self) -> Pieces:
        """Return the pieces of documents that each place holds, by place and position, padding too."""
        return _arcs(self).pieces

    def strides(self, rank: int) -> tuple[Stride, ...]:
        """Return the ascending strides of ``rank``: ``seq_len / size`` tokens."""
        _, start, length, bounds = _arcs(self)
        own = slice(bounds[rank], bounds[rank + 1])
        return tuple(map(Stride, start[own].tolist(), length[own].tolist()))

    def positions(self, rank: int) -> np.ndarray:
        """Return the ascending global positions of ``rank``: int64 ``[seq_len / size]``."""
        return np.concatenate(
            [np.arange(start, start + length) for start, length in self.strides(rank)]
        )


def orders(lengths: np.ndarray) -> list[np.ndarray]:
    """Return permutations of documents: as given, shortest first, longest in the middle, and mixed.

    Up to three documents have one order on a circle, but for its direction.
    """
    count = len(lengths)
    rising = np.argsort(lengths, kind="stable")
    golden = np.arange(count, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )  # 2^64 over the golden ratio
    found = [
        np.arange(count),
        rising,
        np.concatenate([rising[0::2], rising[1::2][::-1]]),
        np.argsort(golden, kind="stable"),
    ]
    return found[: max(1, MOST_BEADS // count)] if count > 3 else found[:1]


def opened(documents: np.ndarray, seq_len: int, reach: tuple[int, int]) -> Beads:
    """Return the documents ``[count + 1]``, cumulative, as beads, and padding up to ``seq_len`` as
    a last one.

    A token sees ``min(n, left)`` before it, if it is the n-th from 0, itself, and ``min(length - 1
    - n, right)`` behind it. So beads also end where one of these becomes constant, or ceases to be.
    """
    left, right = reach
    start, length = documents[:-1, None], np.diff(documents)[:, None]
    falls = (
        np.maximum(length - 1 - right, 0) if right else length
    )  # the first that sees less behind it than before
    begin = np.sort(
        np.concatenate([np.zeros_like(length), np.minimum(left, length), falls], axis=1), axis=1
    )
    end = np.concatenate([begin[:, 1:], length], axis=1)
    first = np.minimum(begin, left) + 1 + np.minimum(length - 1 - begin, right)
    slope = (begin < left).astype(np.int64) - (begin >= falls)
    document = np.broadcast_to(np.arange(len(length))[:, None], begin.shape)
    some = begin < end
    beads = Beads(
        (start + begin)[some], (end - begin)[some], first[some], slope[some], document[some]
    )
    padding = Beads(*np.array([[documents[-1]], [seq_len - documents[-1]], [0], [0], [-1]]))
    return Beads(*map(np.append, beads, padding)) if seq_len > documents[-1] else beads


def divided(layout: ArcLayout, permutations: list[np.ndarray]) -> Circles:
    """Put the documents on a circle in each of the orders, and halve all circles until each is of
    one place.

    Returns the places' circles, those of one order after the other.
    """
    documents, seq_len, places, reach = layout.bounds, layout.seq_len, layout.places, layout.reach
    beads = opened(documents, seq_len, reach)
    index = []
    for permutation in permutations:
        ordinal = np.full(len(documents), len(permutation))  # padding, document -1, comes last
        ordinal[permutation] = np.arange(len(permutation))
        index.append(np.argsort(ordinal[beads.document], kind="stable"))
    shape = np.ones(len(index), dtype=np.int64)
    circles = Circles(
        beads.take(np.concatenate(index)),
        shape * len(beads.start),
        shape * places,
        seq_len // places,
    )
    share = circles.work[0] / places
    while circles.places.max() > 1:
        _, circles = halve(circles, share, reach)
    return circles


def best(layout: ArcLayout) -> Pieces:
    """Return what each place holds, padding too, of the best order of documents.

    It is the order under which the busiest place receives or sends the fewest rows; the first of
    equal ones.
    """
    permutations = orders(np.diff(layout.bounds))
    circles, chosen = divided(layout, permutations), 0
    place, (start, length, _, _, document) = circles.circle, circles.beads
    apart = (
        (place[1:] != place[:-1])
        | (document[1:] != document[:-1])
        | (start[1:] != (start + length)[:-1])
    )
    heads = np.flatnonzero(np.append(True, apart))  # beads of a document that touch are one piece
    pieces = Pieces(
        place[heads], start[heads], np.add.reduceat(length, heads), document[heads], start[heads]
    )
    if len(permutations) > 1:
        chosen = int(np.argmin(_busiest(pieces, layout, len(permutations))))
    own = pieces.take(np.flatnonzero(pieces.place // layout.places == chosen))
    own = own._replace(place=own.place % layout.places)
    return own.take(np.argsort(own.place * layout.seq_len + own.start))


def _busiest(pieces: Pieces, layout: ArcLayout, count: int) -> np.ndarray:
    """Return the most rows that a place receives or sends, for each of ``count`` orders."""
    pieces, line = in_parts(pieces, layout.bounds), Line(count * layout.places, layout.seq_len)
    order = pieces.place // layout.places
    pieces = pieces._replace(document=pieces.document + order * len(layout.bounds))
    rows = travelling(pieces, line, layout.reach)
    sums = [
        np.bincount(side, rows.end - rows.first, line.places)
        for side in np.divmod(line.pairs(rows), line.places)
    ]
    return np.maximum(*sums).reshape(count, -1).max(axis=1)


def in_parts(pieces: Pieces, documents: np.ndarray) -> Pieces:
    """Return the pieces of documents that several places share: only their rows travel."""
    shared = (pieces.document >= 0) & (pieces.length < np.diff(documents)[pieces.document])
    return pieces.take(np.flatnonzero(shared))


def travelling(pieces: Pieces, line: Line, reach: tuple[int, int]) -> Spans:
    """Return the rows that places see and others hold, ascending by reader, owner and position."""
    reader, owner, first, end = rows_seen(pieces, pieces, 1, reach)
    return union(line.spans(reader, owner, first, end).where(reader != owner))


class _Arcs(NamedTuple):
    """Arrays that describe a layout. Rank r has the strides from ``bounds[r]`` to ``bounds[r +
    1]``.
    """

    pieces: Pieces
    start: np.ndarray
    length: np.ndarray
    bounds: np.ndarray


@lru_cache(maxsize=64)
def _arcs(layout: ArcLayout) -> _Arcs:
    pieces = best(layout)
    found = _Arcs(pieces, *_runs(pieces, layout.size))
    for array in (*pieces, *found[1:]):
        array.setflags(write=False)  # all layouts that are equal share it
    return found


def _runs(pieces: Pieces, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join the pieces of each place that touch, and cut places into equal slices for ``size`` ranks
    in all.

    Returns:
        start and length of each run, and the first run of each rank and, last, how many there are.
    """
    begin = np.cumsum(pieces.length) - pieces.length  # on a line of all places' tokens
    total = begin[-1] + pieces.length[-1]
    ranks = np.arange(size) * (total // size)
    apart = pieces.start[1:] != (pieces.start + pieces.length)[:-1]
    joints = begin[np.flatnonzero(np.append(True, apart))]
    cuts = np.sort(
        np.append(joints, ranks[joints[joints.searchsorted(ranks, "right") - 1] < ranks])
    )
    source = begin.searchsorted(cuts, "right") - 1
    start, length = pieces.start[source] + cuts - begin[source], np.diff(cuts, append=total)
    return start, length, np.append(cuts.searchsorted(ranks), len(cuts))
