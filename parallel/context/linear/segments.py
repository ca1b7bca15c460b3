"""Segments of packed documents: what of each lies where, and the chains along which states pass.

A segment is consecutive tokens of one document on one rank. A document in several segments is a chain: the state that
one ends with enters the next, and a short convolution reads the last tokens of those before. A part is segments of a
rank that one scan of the delta rule computes.
"""

from collections import defaultdict
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.delta.rule import forgetting
from parallel.context.errors import ContextError
from parallel.context.geometry import Geometry
from parallel.context.operators import plan_of
from parallel.context.plan import Plan
from parallel.context.transport import Tensors


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


class Part(NamedTuple):
    """Segments of a rank that one scan computes."""

    segments: tuple[Segment, ...]
    wide: bool = False
    """True if it does not wait for the incoming state."""

    @property
    def link(self) -> Segment:
        """Return the only segment of a part that states enter or leave."""
        return self.segments[0]

    def of(self, x: Tensor) -> Tensor:
        """Return the part's tokens of x ``[B, T, ...]``."""
        found = [x[:, segment.tokens] for segment in self.segments]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Copy the part's tokens into x."""
        pieces = values.split([segment.length for segment in self.segments], 1)
        for segment, piece in zip(self.segments, pieces, strict=True):
            x[:, segment.tokens] = piece

    def inputs(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, g and beta, with gates that forget between documents."""
        q, k, v, g, beta = map(self.of, tensors)
        bounds = tuple(accumulate((segment.length for segment in self.segments), initial=0))
        return q, k, v, forgetting(g, bounds), beta


class Parts(NamedTuple):
    """Parts of a rank in the order of its work."""

    first: tuple[Part, ...]
    """Segments that begin a document which goes on elsewhere."""
    wide: tuple[Part, ...]
    whole: tuple[Part, ...]
    """One part of all documents that no other rank has tokens of; none if there is none."""
    last: tuple[Part, ...]
    """Segments that end a document and wait for its state."""

    @property
    def all(self) -> tuple[Part, ...]:
        """Return all parts."""
        return self.first + self.wide + self.whole + self.last


@lru_cache(maxsize=256)
def parts(plan: Plan, rank: int, *, waits: bool = False) -> Parts:
    """Return the parts of a rank, without padding, whatever that holds.

    With ``waits`` a segment that ends a document is never wide, however much of its rank it is.
    """
    found = defaultdict[str, list[Part]](list)
    whole = []
    for segment in segments(plan)[rank]:
        if segment.start >= plan.seq_len:
            continue
        if segment.before is None and segment.after is None:
            whole.append(segment)
        elif segment.before is None:
            found["first"].append(Part((segment,)))
        elif segment.after is not None or (segment.length > plan.local_len // 2 and not waits):
            found["wide"].append(Part((segment,), wide=True))
        else:
            found["last"].append(Part((segment,)))
    if whole:
        found["whole"].append(Part(tuple(whole)))
    return Parts(*(tuple(found[name]) for name in Parts._fields))
