"""Segments of packed documents, the chains that they form over ranks, and how states pass.

A segment is consecutive tokens of one document on one rank. The segments of a document are a chain:
the state after one segment enters the next, and a short convolution reads the last tokens of the
segments before. A part is one or several segments of a rank that one scan of the delta rule
computes.

A segment, or several in sequence, maps the incoming state S to M S + U. A message is such a map, or
U alone if the segments begin the document, where S is 0. Messages follow a schedule, in rounds that
all ranks compute from the plan. For a chain of n segments:

* ``chain``: each segment passes the state on to the next, in n - 1 rounds.
* ``tree``: each segment has the map of a number of segments before it, and this number doubles each
  round (Hillis and Steele 1986): ceil(log2 n) rounds.

Gradients pass along the reversed chain, with M^T in place of M; U is the gradient that a segment
adds.

Maps of states compose, (M2, U2) after (M1, U1) is (M2 M1, M2 U1 + U2), and composition is
associative. A parallel prefix sum needs no more. So the delta rule, which is sequential in its
tokens, can run on many ranks at once: each rank computes its map without knowing its state.
"""

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
    """Position of its first token in the sequence."""
    offset: int
    """Local index of its first token."""
    length: int
    chain: int
    """Index of its document in the sequence."""
    depth: int
    """Number of segments of the document before this one."""
    num_after: int
    """Number of segments of the document after this one."""
    previous_rank: int | None
    """Rank of the preceding segment; None if the document begins here."""
    next_rank: int | None
    """Rank of the following segment; None if the document ends here."""

    @property
    def tokens(self) -> slice:
        """Local indices of the segment's tokens."""
        return slice(self.offset, self.offset + self.length)

    def last(self, count: int) -> slice:
        """Return the local indices of the segment's last ``count`` tokens."""
        return slice(self.offset + self.length - count, self.offset + self.length)


Chain = tuple[Segment, ...]
"""The segments of one document."""


@lru_cache(maxsize=64)
def chains(plan: Plan) -> tuple[Chain, ...]:
    """Return the chains of a plan, in order of position.

    Padding comes last; each of its segments counts as a document.

    Raises:
        ContextError: the ranks of the layout do not hold consecutive tokens.
    """
    if plan.layout.stride > 1:
        raise ContextError(
            f"context_parallel_layout is {plan.layout.name!r}, but states pass along consecutive "
            "tokens, and in this layout a rank's tokens are not consecutive; use contiguous, "
            "zigzag or balanced"
        )
    stretches = []
    for rank in range(plan.size):
        for piece in plan.pieces((rank,)):
            stretches.append((piece.start, rank, piece.offset, piece.length))
    stretches.sort()

    starts = {0, *plan.boundaries}
    by_document: list[list[tuple[int, int, int, int]]] = []
    for stretch in stretches:
        if stretch[0] in starts or stretch[0] > plan.seq_len:
            by_document.append([])
        by_document[-1].append(stretch)

    linked: list[Chain] = []
    for number, document in enumerate(by_document):
        ranks = [None, *(rank for _, rank, _, _ in document), None]
        chain = []
        for depth, (start, rank, offset, length) in enumerate(document):
            chain.append(
                Segment(
                    rank=rank,
                    start=start,
                    offset=offset,
                    length=length,
                    chain=number,
                    depth=depth,
                    num_after=len(document) - 1 - depth,
                    previous_rank=ranks[depth],
                    next_rank=ranks[depth + 2],
                )
            )
        linked.append(tuple(chain))
    return tuple(linked)


@lru_cache(maxsize=64)
def segments(plan: Plan) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of each rank, in order of position; raises the errors of ``chains``."""
    by_rank: list[list[Segment]] = [[] for _ in range(plan.size)]
    for chain in chains(plan):
        for segment in chain:
            by_rank[segment.rank].append(segment)
    return tuple(map(tuple, by_rank))


@lru_cache(maxsize=64)
def cut(plan: Plan) -> tuple[Chain, ...]:
    """Return the chains of several segments, without padding: documents cut between ranks."""
    return tuple(
        chain for chain in chains(plan) if len(chain) > 1 and chain[0].start < plan.seq_len
    )


def state_plan(called: str, handle: Tensor, geometry: Geometry) -> Plan:
    """Return the plan of a handle, after checking that states can pass along it.

    Raises:
        ContextError: the plan is of another geometry, or states cannot pass along it; ``called``
            names the function that the user called.
    """
    plan = plan_of(handle, geometry)
    chains(plan)
    if not plan.causal or plan.mask.window:
        mask = f"window {plan.mask.window}" if plan.causal else "a full mask"
        raise ContextError(
            f"{called}: the plan has {mask}, but a state sums up all earlier tokens; use a causal "
            "plan without a window"
        )
    return plan


class ScanPart(NamedTuple):
    """Segments of one rank that a single scan computes."""

    segments: tuple[Segment, ...]
    is_eager: bool = False
    """True if the part does not wait for its incoming state: a wider scan computes its map instead.
    """

    @property
    def link(self) -> Segment:
        """Segment through which a state enters or leaves the part; it is then the only one."""
        return self.segments[0]

    def of(self, x: Tensor) -> Tensor:
        """Return the part's tokens of x ``[B, T, ...]``."""
        pieces = [x[:, segment.tokens] for segment in self.segments]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Copy the part's tokens into x."""
        pieces = values.split([segment.length for segment in self.segments], 1)
        for segment, piece in zip(self.segments, pieces, strict=True):
            x[:, segment.tokens] = piece

    def inputs(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, g and beta, with gates that reset the state between documents."""
        q, k, v, g, beta = map(self.of, tensors)
        lengths = (segment.length for segment in self.segments)
        cu_seqlens = tuple(accumulate(lengths, initial=0))
        return q, k, v, gates_with_resets(g, cu_seqlens), beta


class RankParts(NamedTuple):
    """The parts of one rank, in the order in which it computes them."""

    first: tuple[ScanPart, ...]
    """Segments that begin a document whose end is on another rank."""
    eager: tuple[ScanPart, ...]
    """Parts that do not wait for their state."""
    whole: tuple[ScanPart, ...]
    """One part with all documents that lie only on this rank; empty if there are none."""
    last: tuple[ScanPart, ...]
    """Segments that end a document and wait for its state."""

    @property
    def all(self) -> tuple[ScanPart, ...]:
        """All parts."""
        return self.first + self.eager + self.whole + self.last


@lru_cache(maxsize=256)
def parts(plan: Plan, rank: int, *, waits: bool = False) -> RankParts:
    """Return the parts of a rank, without padding; tensors may hold anything in padding.

    A wide scan costs about twice a plain one, so it is used only if it saves waiting: for segments
    in the middle of a document, on which others wait, and for a segment that ends a document if it
    has most of its rank's tokens. With ``waits`` a segment that ends a document is never eager.
    """
    first = []
    eager = []
    whole = []
    last = []
    for segment in segments(plan)[rank]:
        if segment.start >= plan.seq_len:
            continue
        begins = segment.previous_rank is None
        ends = segment.next_rank is None
        if begins and ends:
            whole.append(segment)
        elif begins:
            first.append(ScanPart((segment,)))
        elif not ends or (segment.length > plan.local_len // 2 and not waits):
            eager.append(ScanPart((segment,), is_eager=True))
        else:
            last.append(ScanPart((segment,)))
    whole_part = (ScanPart(tuple(whole)),) if whole else ()
    return RankParts(tuple(first), tuple(eager), whole_part, tuple(last))


LONGEST_CHAIN = 8
"""Maximum number of segments per document for which ``auto`` takes the chain, which sends the
fewest bytes but has the most rounds.
"""


class StateMessage(NamedTuple):
    """A message with the map of consecutive segments, the last of which is ``source``."""

    source: Segment
    target: Segment
    state: bool
    """True if these segments begin the document; the message is then U alone, a state."""

    @property
    def peer(self) -> int:
        """The rank that receives the message."""
        return self.target.rank


StateRound = tuple[StateMessage, ...]
Schedule = Literal["chain", "tree"]


def _chain(chain: Chain) -> Iterator[list[StateMessage]]:
    for source, target in pairwise(chain):
        yield [StateMessage(source, target, True)]


def _tree(chain: Chain) -> Iterator[list[StateMessage]]:
    covered = 0  # each segment already has the map of this many segments before it
    while covered < len(chain) - 1:
        messages = []
        for index, target in enumerate(chain[covered + 1 :]):
            messages.append(StateMessage(chain[index], target, index <= covered))
        yield messages
        covered = 2 * covered + 1


SCHEDULES: dict[Schedule, Callable[[Chain], Iterator[list[StateMessage]]]] = {
    "chain": _chain,
    "tree": _tree,
}


def schedule_of(plan: Plan) -> Schedule:
    """Return the plan's schedule, with ``auto`` resolved.

    ``auto`` takes the tree if a document has more than ``LONGEST_CHAIN`` segments. Latency decides
    then: the rounds of a chain grow with the number of segments, those of a tree with its logarithm
    (docs/concepts/linear_attention.md counts both).
    """
    requested = plan.geometry.options.delta_rule_schedule
    if requested in SCHEDULES:
        return requested
    return "chain" if max(map(len, cut(plan)), default=0) <= LONGEST_CHAIN else "tree"


@lru_cache(maxsize=64)
def rounds(
    plan: Plan, *, gradient: bool = False, schedule: Schedule | None = None
) -> tuple[StateRound, ...]:
    """Return the rounds of a forward or, with ``gradient``, a backward pass, for all ranks.

    The rounds cover all documents. ``schedule`` is by default that of ``schedule_of``. Two ranks
    exchange the messages of a round in the order of this list. A segment receives at most one
    message per round; each message covers the segments before those of the previous message (for
    gradients, the segments after them).

    Raises:
        ContextError: for the same reasons as ``chains``.
    """
    all_rounds: list[list[StateMessage]] = []
    chain_rounds = SCHEDULES[schedule or schedule_of(plan)]
    for chain in cut(plan):
        for number, messages in enumerate(chain_rounds(chain[::-1] if gradient else chain)):
            if number == len(all_rounds):
                all_rounds.append([])
            all_rounds[number] += messages
    return tuple(map(tuple, all_rounds))


@lru_cache(maxsize=256)
def rounds_of(
    plan: Plan, rank: int, *, gradient: bool
) -> tuple[tuple[StateRound, StateRound], ...]:
    """Return the messages that a rank sends and receives, in each round in which it takes part."""
    rank_rounds = []
    for messages in rounds(plan, gradient=gradient):
        sends = tuple(message for message in messages if message.source.rank == rank)
        receives = tuple(message for message in messages if message.peer == rank)
        if sends or receives:
            rank_rounds.append((sends, receives))
    return tuple(rank_rounds)
