"""The layout ``balanced``: every rank has the same tokens and the same work, whatever documents the sequence packs."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from parallel.context.arcs.orders import Packing, best
from parallel.context.errors import ContextError
from parallel.context.layout import Stride
from parallel.context.sparse.visible import Pieces


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
        window: how many tokens before and behind itself a token sees, besides itself: -1 for all of its document's.
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

    @property
    def packing(self) -> Packing:
        """Return what is divided among places."""
        return Packing(np.array(self.documents, dtype=np.int64), self.seq_len, self.places, self.reach)

    def pieces(self) -> Pieces:
        """Return the pieces of documents that each place holds, by place and position, padding too."""
        return _arcs(self).pieces

    def strides(self, rank: int) -> tuple[Stride, ...]:
        """Return the ascending strides of ``rank``: ``seq_len / size`` tokens."""
        if not 0 <= rank < self.size:
            raise ContextError(f"rank {rank} is not among {self.size} ranks")
        _, start, length, bounds = _arcs(self)
        own = slice(bounds[rank], bounds[rank + 1])
        return tuple(map(Stride, start[own].tolist(), length[own].tolist()))

    def positions(self, rank: int) -> np.ndarray:
        """Return the ascending global positions of ``rank``: int64 ``[seq_len / size]``."""
        return np.concatenate([np.arange(start, start + length) for start, length in self.strides(rank)])


class _Arcs(NamedTuple):
    """Arrays that describe a layout. Rank r has the strides from ``bounds[r]`` to ``bounds[r + 1]``."""

    pieces: Pieces
    start: np.ndarray
    length: np.ndarray
    bounds: np.ndarray


@lru_cache(maxsize=64)
def _arcs(layout: ArcLayout) -> _Arcs:
    pieces = best(layout.packing)
    found = _Arcs(pieces, *_runs(pieces, layout.size))
    for array in (*pieces, *found[1:]):
        array.setflags(write=False)  # all layouts that are equal share it
    return found


def _runs(pieces: Pieces, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join the pieces of each place that touch, and cut places into equal slices for ``size`` ranks in all.

    Returns:
        start and length of each run, and the first run of each rank and, last, how many there are.
    """
    begin = np.cumsum(pieces.length) - pieces.length  # on a line of all places' tokens
    total = begin[-1] + pieces.length[-1]
    ranks = np.arange(size) * (total // size)
    apart = pieces.start[1:] != (pieces.start + pieces.length)[:-1]
    joints = begin[np.flatnonzero(np.append(True, apart))]
    cuts = np.sort(np.append(joints, ranks[joints[joints.searchsorted(ranks, "right") - 1] < ranks]))
    source = begin.searchsorted(cuts, "right") - 1
    start, length = pieces.start[source] + cuts - begin[source], np.diff(cuts, append=total)
    return start, length, np.append(cuts.searchsorted(ranks), len(cuts))
