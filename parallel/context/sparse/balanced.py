"""The layout ``balanced``: every rank has the same number of tokens and equal work.

It balances any documents. They lie on a circle (``circles``) in any order. Each order gives a
balanced layout, but some cut documents at better points than others, so a few orders are tried.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from parallel.context.layout import Stride
from parallel.context.sparse.beads import Beads, Circles
from parallel.context.sparse.circles import halve
from parallel.context.sparse.rows import Line, Pieces, Spans, rows_seen, union

MAX_BEADS = 8_000
"""Maximum number of documents, summed over all orders that are tried; with more documents, fewer
orders are tried. A thousand take about a millisecond.
"""
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio


@dataclass(frozen=True)
class ArcLayout:
    """Layout that cuts circles of packed documents into an arc for each place; see ``circles``.

    Args:
        seq_len: number of tokens, a multiple of ``size``.
        real: number of real tokens; the rest is padding, which belongs to no document and has no
            work.
        size: number of ranks.
        team_size: number of neighbouring ranks that share a place; each has a slice of its tokens.
        cu_seqlens: cumulative lengths, ``(0, l1, l1 + l2, ..., real)``.
        causal: True if a token sees no later token.
        window: numbers of tokens that a token sees before and after itself; -1 for all tokens of
            its document.
    """

    seq_len: int
    real: int
    size: int
    team_size: int
    cu_seqlens: tuple[int, ...]
    causal: bool = True
    window: tuple[int, int] | None = None

    name = "balanced"
    stride = 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of the layout, computed once, since it reads the lengths of all documents."""
        fields = (self.seq_len, self.real, self.size, self.team_size, self.causal)
        return hash((*fields, self.cu_seqlens, self.window or ()))

    @property
    def num_places(self) -> int:
        """Number of places, each of ``team_size`` ranks."""
        return self.size // self.team_size

    @property
    def reach(self) -> tuple[int, int]:
        """Maximum numbers of tokens that a token sees before and after itself."""
        tokens_before, tokens_after = self.window or (-1, 0 if self.causal else -1)
        return (
            self.real if tokens_before < 0 else tokens_before,
            self.real if tokens_after < 0 else tokens_after,
        )

    @cached_property
    def cu_seqlens_array(self) -> np.ndarray:
        """``cu_seqlens`` as an array: int64 ``[documents + 1]``."""
        return np.array(self.cu_seqlens, dtype=np.int64)

    def pieces(self) -> Pieces:
        """Return the pieces at all places, including padding, sorted by place and position."""
        return _arcs(self).pieces

    def strides(self, rank: int) -> tuple[Stride, ...]:
        """Return the ascending strides of ``rank``: ``seq_len / size`` tokens."""
        arcs = _arcs(self)
        runs = slice(arcs.bounds[rank], arcs.bounds[rank + 1])
        return tuple(map(Stride, arcs.start[runs].tolist(), arcs.length[runs].tolist()))

    def positions(self, rank: int) -> np.ndarray:
        """Return the ascending global positions of ``rank``: int64 ``[seq_len / size]``."""
        return np.concatenate(
            [np.arange(start, start + length) for start, length in self.strides(rank)]
        )


def orders(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the permutations of documents to try.

    They are: as given, shortest first, longest in the middle, and mixed. Up to three documents have
    only one order on a circle, apart from the direction.
    """
    count = len(lengths)
    as_given = np.arange(count)
    if count <= 3:
        return [as_given]
    rising = np.argsort(lengths, kind="stable")
    longest_in_middle = np.concatenate([rising[0::2], rising[1::2][::-1]])
    mixed = np.argsort(np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN), kind="stable")
    permutations = [as_given, rising, longest_in_middle, mixed]
    return permutations[: max(1, MAX_BEADS // count)]


def opened(cu_seqlens: np.ndarray, seq_len: int, reach: tuple[int, int]) -> Beads:
    """Convert documents, given by cumulative lengths ``[count + 1]``, to beads.

    A bead is a piece of a document along which the work per token grows or falls linearly. Padding
    up to ``seq_len`` is the last bead. With ``reach`` (before, after), token n of a document,
    counted from 0, sees ``min(n, before)`` tokens before itself, itself, and
    ``min(length - 1 - n, after)`` tokens after itself. So a bead also ends where one of these
    numbers becomes constant, or ceases to be constant.
    """
    max_before, max_after = reach
    start = cu_seqlens[:-1, None]
    length = np.diff(cu_seqlens)[:, None]

    falls = length  # after this token, each token sees one later token fewer than the one before
    if max_after:
        falls = np.maximum(length - 1 - max_after, 0)

    # Beads begin at token 0, at the first full window, and where windows reach the document's end.
    edges = np.concatenate([np.zeros_like(length), np.minimum(max_before, length), falls], axis=1)
    begin = np.sort(edges, axis=1)
    end = np.concatenate([begin[:, 1:], length], axis=1)
    first = np.minimum(begin, max_before) + 1 + np.minimum(length - 1 - begin, max_after)
    slope = (begin < max_before).astype(np.int64) - (begin >= falls)
    document = np.broadcast_to(np.arange(len(length))[:, None], begin.shape)

    is_filled = begin < end
    beads = Beads(
        start=(start + begin)[is_filled],
        length=(end - begin)[is_filled],
        first=first[is_filled],
        slope=slope[is_filled],
        document=document[is_filled],
    )
    if seq_len <= cu_seqlens[-1]:
        return beads
    padding = (cu_seqlens[-1], seq_len - cu_seqlens[-1], 0, 0, -1)
    return Beads(*map(np.append, beads, padding))


def divided(layout: ArcLayout, permutations: list[np.ndarray]) -> Circles:
    """Put the documents on a circle in each order; halve the circles until each has one place.

    Returns the circles of all places, one order after the other.
    """
    cu_seqlens = layout.cu_seqlens_array
    num_places = layout.num_places
    beads = opened(cu_seqlens, layout.seq_len, layout.reach)

    bead_order = []
    for permutation in permutations:
        ordinal = np.full(len(cu_seqlens), len(permutation))  # padding (document -1) comes last
        ordinal[permutation] = np.arange(len(permutation))
        bead_order.append(np.argsort(ordinal[beads.document], kind="stable"))

    one_each = np.ones(len(permutations), dtype=np.int64)
    circles = Circles(
        beads=beads.take(np.concatenate(bead_order)),
        counts=one_each * len(beads.start),
        num_places=one_each * num_places,
        tokens=layout.seq_len // num_places,
    )
    share = circles.work[0] / num_places
    while circles.num_places.max() > 1:
        _, circles = halve(circles, share, layout.reach)
    return circles


def best(layout: ArcLayout) -> Pieces:
    """Return the pieces of each place, including padding, under the best order of documents.

    In the best order the busiest place receives or sends the fewest rows; of equal orders the first
    wins. Work is balanced under every order, so communication alone decides.
    """
    permutations = orders(np.diff(layout.cu_seqlens_array))
    circles = divided(layout, permutations)
    place = circles.circle
    start, length, _, _, document = circles.beads

    # Adjacent beads of one document form one piece.
    is_new_piece = (
        (place[1:] != place[:-1])
        | (document[1:] != document[:-1])
        | (start[1:] != (start + length)[:-1])
    )
    heads = np.flatnonzero(np.append(True, is_new_piece))
    pieces = Pieces(
        place=place[heads],
        start=start[heads],
        length=np.add.reduceat(length, heads),
        document=document[heads],
        offset=start[heads],
    )

    chosen = 0
    if len(permutations) > 1:
        chosen = int(np.argmin(_busiest(pieces, layout, len(permutations))))
    pieces = pieces.take(np.flatnonzero(pieces.place // layout.num_places == chosen))
    pieces = pieces._replace(place=pieces.place % layout.num_places)
    return pieces.take(np.argsort(pieces.place * layout.seq_len + pieces.start))


def _busiest(pieces: Pieces, layout: ArcLayout, count: int) -> np.ndarray:
    """Return the maximum number of rows that a place receives or sends, for each of the orders.

    All orders are counted at once: each order's places and documents get separate numbers.
    """
    pieces = in_parts(pieces, layout.cu_seqlens_array)
    line = Line(count * layout.num_places, layout.seq_len)
    order = pieces.place // layout.num_places
    pieces = pieces._replace(document=pieces.document + order * len(layout.cu_seqlens_array))

    rows = travelling(pieces, line, layout.reach)
    num_rows = rows.end - rows.first
    reader, owner = np.divmod(line.pairs(rows), line.num_places)
    received = np.bincount(reader, num_rows, line.num_places)
    sent = np.bincount(owner, num_rows, line.num_places)
    return np.maximum(received, sent).reshape(count, -1).max(axis=1)


def in_parts(pieces: Pieces, cu_seqlens: np.ndarray) -> Pieces:
    """Return the pieces of documents that are split over places; no other rows travel."""
    is_shared = (pieces.document >= 0) & (pieces.length < np.diff(cu_seqlens)[pieces.document])
    return pieces.take(np.flatnonzero(is_shared))


def travelling(pieces: Pieces, line: Line, reach: tuple[int, int]) -> Spans:
    """Return the rows that one place sees and another holds, sorted by reader, owner, position."""
    reader, owner, first, end = rows_seen(pieces, pieces, 1, reach)
    return union(line.spans(reader, owner, first, end).where(reader != owner))


class _Arcs(NamedTuple):
    """Arrays of an ``ArcLayout``: the pieces of all places, and the strides of all ranks.

    Rank r has the strides with indices from ``bounds[r]`` to ``bounds[r + 1]``.
    """

    pieces: Pieces
    start: np.ndarray
    length: np.ndarray
    bounds: np.ndarray


@lru_cache(maxsize=64)
def _arcs(layout: ArcLayout) -> _Arcs:
    pieces = best(layout)
    start, length, bounds = _runs(pieces, layout.size)
    for array in (*pieces, start, length, bounds):
        array.setflags(write=False)  # cached for all equal layouts
    return _Arcs(pieces, start, length, bounds)


def _runs(pieces: Pieces, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join adjacent pieces of each place into runs, and cut places into slices for ``size`` ranks.

    Returns:
        start and length of each run; and the index of each rank's first run, followed by the number
        of runs.
    """
    # Positions at which pieces and ranks begin, on a line of all places' tokens.
    begin = np.cumsum(pieces.length) - pieces.length
    total = begin[-1] + pieces.length[-1]
    ranks = np.arange(size) * (total // size)

    # A run begins after a gap, or at a rank that begins inside a run.
    is_gap = pieces.start[1:] != (pieces.start + pieces.length)[:-1]
    joints = begin[np.flatnonzero(np.append(True, is_gap))]
    is_inside_run = joints[joints.searchsorted(ranks, "right") - 1] < ranks
    cuts = np.sort(np.append(joints, ranks[is_inside_run]))

    source = begin.searchsorted(cuts, "right") - 1
    start = pieces.start[source] + cuts - begin[source]
    length = np.diff(cuts, append=total)
    return start, length, np.append(cuts.searchsorted(ranks), len(cuts))
