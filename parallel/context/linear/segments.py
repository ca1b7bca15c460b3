"""Segments of packed documents: what of each lies where, and the chains along which states pass.

A segment is consecutive tokens of one document on one rank. A document in several segments is a chain: the state that
one ends with enters the next, and a short convolution reads the last tokens of those before.
"""

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.geometry import Geometry
from parallel.context.operators import plan_of
from parallel.context.plan import Plan


class Segment(NamedTuple):
    """Consecutive tokens of one document on one rank."""

    rank: int
    start: int
    """Position in the sequence."""
    offset: int
    """Its first token on its rank."""
    length: int
    chain: int
    """Number of its document among those of the sequence, and of the segment in it."""
    depth: int
    left: int
    """Segments of the document after this one."""
    before: int | None
    """Rank of the segment before it, and of the one after it; None where the document begins or ends here."""
    after: int | None

    @property
    def tokens(self) -> slice:
        """Return the segment's tokens on its rank."""
        return slice(self.offset, self.offset + self.length)

    def last(self, count: int) -> slice:
        """Return its last tokens on its rank."""
        return slice(self.offset + self.length - count, self.offset + self.length)


Chain = tuple[Segment, ...]
"""The segments of one document."""


@lru_cache(maxsize=64)
def chains(plan: Plan) -> tuple[Chain, ...]:
    """Return the chains of a plan by position; padding, whose segments are documents of their own, comes last.

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
    found: list[list[tuple[int, int, int, int]]] = []
    for piece in placed:
        if piece[0] in begins or piece[0] > plan.seq_len:
            found.append([])
        found[-1].append(piece)
    return tuple(_linked(number, chain) for number, chain in enumerate(found))


def _linked(number: int, chain: list[tuple[int, int, int, int]]) -> Chain:
    ranks = [None, *(rank for _, rank, _, _ in chain), None]
    return tuple(
        Segment(rank, start, offset, length, number, i, len(chain) - 1 - i, ranks[i], ranks[i + 2])
        for i, (start, rank, offset, length) in enumerate(chain)
    )


@lru_cache(maxsize=64)
def segments(plan: Plan) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of each rank, by position; raises as ``chains``."""
    found: list[list[Segment]] = [[] for _ in range(plan.size)]
    for chain in chains(plan):
        for segment in chain:
            found[segment.rank].append(segment)
    return tuple(map(tuple, found))


@lru_cache(maxsize=64)
def cut(plan: Plan) -> tuple[Chain, ...]:
    """Return the chains of more than one segment, without padding: documents that several ranks hold parts of."""
    return tuple(chain for chain in chains(plan) if len(chain) > 1 and chain[0].start < plan.seq_len)


def state_plan(called: str, handle: Tensor, geometry: Geometry) -> Plan:
    """Return a plan by its handle.

    Raises:
        ContextError: it is not of this geometry, or states cannot pass along it; ``called`` says who asked.
    """
    plan = plan_of(handle, geometry)
    chains(plan)
    if not plan.causal or plan.mask.window:
        seen = f"window {plan.mask.window}" if plan.causal else "a full mask"
        raise ContextError(f"{called}: a plan of {seen}, and a state holds all tokens before; leave it out")
    return plan
