"""Segments of packed documents, the chains that they form over ranks, and the rounds by which
states pass along them.

A segment is consecutive tokens of one document on one rank. A document in several segments is a
chain: the state that one ends with enters the next, and a short convolution reads the last tokens
of those before. A part is segments of a rank that one scan of the delta rule computes.

A segment, or several in sequence, is a map of states: S goes to M S + U. A message is such a map,
or U alone once it reaches the document's beginning, where S is 0. Messages pass by a schedule, in
rounds that all ranks compute from the plan. Per chain of n segments:

* ``chain``: each passes the state on to the next, n - 1 rounds.
* ``tree``: the map of what a segment knows of those before it doubles each round (Hillis and Steele
  1986), ceil(log2 n) rounds.

Gradients pass along the reversed chain: M^T, and U is the gradient that the segment adds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.delta.rule import gates_with_resets
from parallel.context.geometry import Geometry
from parallel.context.layout import ContextError
from parallel.context.plan import Plan, plan_of
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
    """Rank of the segment before it, and of the one after it; None where the document begins or
    ends here.
    """
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
    """Return the chains of a plan by position; padding, whose segments are documents of their own,
    comes last.

    Raises:
        ContextError: a layout whose ranks hold no consecutive tokens.
    """
    if plan.layout.stride > 1:
        raise ContextError(
            f"context_parallel_layout is {plan.layout.name!r}, where each token is a segment of its own; states pass "
            "along consecutive tokens: use contiguous, zigzag or balanced"
        )
    placed = sorted(
        (piece.start, rank, piece.offset, piece.length)
        for rank in range(plan.size)
        for piece in plan.pieces((rank,))
    )
    begins = {0, *plan.boundaries}
    found: list[list[tuple[int, int, int, int]]] = []
    for piece in placed:
        if piece[0] in begins or piece[0] > plan.seq_len:
            found.append([])
        found[-1].append(piece)
    linked: list[Chain] = []
    for number, chain in enumerate(found):
        ranks = [None, *(rank for _, rank, _, _ in chain), None]
        segments = (
            Segment(
                rank, start, offset, length, number, i, len(chain) - 1 - i, ranks[i], ranks[i + 2]
            )
            for i, (start, rank, offset, length) in enumerate(chain)
        )
        linked.append(tuple(segments))
    return tuple(linked)


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
    """Return the chains of more than one segment, without padding: documents that several ranks
    hold parts of.
    """
    return tuple(
        chain for chain in chains(plan) if len(chain) > 1 and chain[0].start < plan.seq_len
    )


def state_plan(called: str, handle: Tensor, geometry: Geometry) -> Plan:
    """Return a plan by its handle.

    Raises:
        ContextError: it is not of this geometry, or states cannot pass along it; ``called`` says
            who asked.
    """
    plan = plan_of(handle, geometry)
    chains(plan)
    if not plan.causal or plan.mask.window:
        seen = f"window {plan.mask.window}" if plan.causal else "a full mask"
        raise ContextError(
            f"{called}: a plan of {seen}, and a state holds all tokens before; leave it out"
        )
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
        return q, k, v, gates_with_resets(g, bounds), beta


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


LONGEST_CHAIN = 8
"""Segments of a document up to which ``auto`` takes the chain; its bytes are the fewest, its rounds
the most.
"""


class Message(NamedTuple):
    """The map of consecutive segments up to ``source``."""

    source: Segment
    target: Segment
    state: bool
    """True if these segments begin the document, so that U is all of it."""

    @property
    def peer(self) -> int:
        """Return the rank that it goes to."""
        return self.target.rank


Round = tuple[Message, ...]
Schedule = Literal["chain", "tree"]


def _chain(chain: Chain) -> Iterator[list[Message]]:
    for one, other in pairwise(chain):
        yield [Message(one, other, True)]


def _tree(chain: Chain) -> Iterator[list[Message]]:
    known = 0  # segments right before its own that each has the map of
    while known < len(chain) - 1:
        reached = 2 * known + 1
        later = enumerate(chain[known + 1 :])
        yield [Message(chain[i], segment, i <= known) for i, segment in later]
        known = reached


SCHEDULES: dict[Schedule, Callable[[Chain], Iterator[list[Message]]]] = {
    "chain": _chain,
    "tree": _tree,
}


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan; ``auto`` takes the tree where some document has over
    ``LONGEST_CHAIN`` segments.

    Latency decides there: a chain's rounds grow with its segments, a tree's with their logarithm
    (docs/concepts/ linear_attention.md counts both).
    """
    asked = plan.geometry.options.delta_rule_schedule
    if asked in SCHEDULES:
        return asked
    return "chain" if max(map(len, cut(plan)), default=0) <= LONGEST_CHAIN else "tree"


@lru_cache(maxsize=64)
def rounds(
    plan: Plan, *, gradient: bool = False, schedule: Schedule | None = None
) -> tuple[Round, ...]:
    """Return the rounds of a forward or (``gradient``) a backward, of all ranks and documents.

    ``schedule`` is by default that of ``schedule_of``.

    Between two ranks messages go in this order. What is for one segment comes by position, the
    first of the document (for gradients the last) first, and before what came in earlier rounds.

    Raises:
        ContextError: as ``chains``.
    """
    found: list[list[Message]] = []
    pass_on = SCHEDULES[schedule or schedule_of(plan)]
    for chain in cut(plan):
        for number, messages in enumerate(pass_on(chain[::-1] if gradient else chain)):
            found += [[]] * (number == len(found))
            found[number] = found[number] + messages
    return tuple(map(tuple, found))


@lru_cache(maxsize=256)
def rounds_of(plan: Plan, rank: int, *, gradient: bool) -> tuple[tuple[Round, Round], ...]:
    """Return what a rank sends and what comes to it in each round that it takes part in."""
    found = []
    for messages in rounds(plan, gradient=gradient):
        leaving = tuple(message for message in messages if message.source.rank == rank)
        coming = tuple(message for message in messages if message.peer == rank)
        if leaving or coming:
            found.append((leaving, coming))
    return tuple(found)
