"""Segments of packed documents: what of each lies where, and the chains along which states pass.

A segment is consecutive tokens of one document on one rank. A document in several segments is a chain: the state that
one ends with enters the next. With the order of segments known to all ranks, transfers go in rounds: in round r every
rank sends what its segments of depth r end with, so that no rank waits for one that waits for it.
"""

from functools import lru_cache
from typing import NamedTuple

from parallel.context.errors import ContextError
from parallel.context.plan import Plan


class Segment(NamedTuple):
    """Consecutive tokens of one document on one rank."""

    start: int
    """Position in the sequence."""
    offset: int
    """Its first token on its rank."""
    length: int
    depth: int
    """Number of the document's segments before this one, and of those after it."""
    left: int
    before: int | None
    """Rank of the segment before it, and of the one after it; None where the document begins or ends here."""
    after: int | None

    @property
    def tokens(self) -> slice:
        """Return the segment's tokens on its rank."""
        return slice(self.offset, self.offset + self.length)


@lru_cache(maxsize=64)
def segments(plan: Plan) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of each rank, by position; those of padding are documents of their own.

    Raises:
        ContextError: a layout whose ranks hold no consecutive tokens.
    """
    if plan.layout.stride > 1:
        raise ContextError(
            f"context_parallel_layout is {plan.layout.name!r}, where each token is a segment of its own; states pass "
            "along consecutive tokens: use contiguous, zigzag or balanced"
        )
    placed = sorted(
        (piece.start, rank, piece.offset, piece.length) for rank in range(plan.size) for piece in plan.pieces((rank,))
    )
    begins = {0, *plan.boundaries}
    chains: list[list[tuple[int, int, int, int]]] = []
    for piece in placed:
        if piece[0] in begins or piece[0] > plan.seq_len:
            chains.append([])
        chains[-1].append(piece)
    found: list[list[Segment]] = [[] for _ in range(plan.size)]
    for chain in chains:
        ranks = [None, *(rank for _, rank, _, _ in chain), None]
        for depth, (start, rank, offset, length) in enumerate(chain):
            ends = ranks[depth], ranks[depth + 2]
            found[rank].append(Segment(start, offset, length, depth, len(chain) - 1 - depth, *ends))
    return tuple(map(tuple, found))
