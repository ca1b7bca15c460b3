"""Schedules by which states pass along the segments of a document, in rounds that all ranks compute from the plan.

A segment, or several in sequence, is a map of states: S goes to M S + U. A message is such a map, or U alone once it
reaches the document's beginning, where S is 0. Per chain of n segments:

* ``chain``: each passes the state on to the next, n - 1 rounds.
* ``tree``: the map of what a segment knows of those before it doubles each round (Hillis and Steele 1986), ceil(log2 n)
  rounds.
* ``gather``: each sends its own map to every rank with a later segment, one round.

Gradients pass along the reversed chain: M^T, and U is the gradient that the segment adds.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from parallel.context.linear.segments import Chain, Segment, cut
from parallel.context.plan import Plan

LONGEST_CHAIN = 8
"""Segments of a document up to which ``auto`` takes the chain; its bytes are the fewest, its rounds the most."""


class Message(NamedTuple):
    """The map of consecutive segments up to ``source``, for segments of one rank."""

    source: Segment
    targets: tuple[Segment, ...]
    state: bool
    """True if these segments begin the document, so that U is all of it."""

    @property
    def peer(self) -> int:
        """Return the rank that it goes to."""
        return self.targets[0].rank


Round = tuple[Message, ...]
Schedule = Literal["chain", "tree", "gather"]


def _chain(chain: Chain) -> Iterator[list[Message]]:
    for one, other in pairwise(chain):
        yield [Message(one, (other,), True)]


def _tree(chain: Chain) -> Iterator[list[Message]]:
    known = 0  # segments right before its own that each has the map of
    while known < len(chain) - 1:
        reached = 2 * known + 1
        later = enumerate(chain[known + 1 :])
        yield [Message(chain[i], (segment,), i <= known) for i, segment in later]
        known = reached


def _gather(chain: Chain) -> Iterator[list[Message]]:
    found = []
    for i, segment in enumerate(chain[:-1]):
        ranks: dict[int, list[Segment]] = {}
        for later in chain[i + 1 :]:
            ranks.setdefault(later.rank, []).append(later)
        found += [Message(segment, tuple(several), i == 0) for several in ranks.values()]
    yield found


SCHEDULES: dict[Schedule, Callable[[Chain], Iterator[list[Message]]]] = {
    "chain": _chain,
    "tree": _tree,
    "gather": _gather,
}


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan; ``auto`` takes the tree where some document has over ``LONGEST_CHAIN`` segments.

    Latency decides there: a chain's rounds grow with its segments, a tree's with their logarithm (docs/concepts/
    linear_attention.md counts both).
    """
    asked = plan.geometry.options.delta_rule_schedule
    if asked in SCHEDULES:
        return asked
    return "chain" if max(map(len, cut(plan)), default=0) <= LONGEST_CHAIN else "tree"


@lru_cache(maxsize=64)
def rounds(plan: Plan, *, gradient: bool = False, schedule: Schedule | None = None) -> tuple[Round, ...]:
    """Return the rounds of a forward or (``gradient``) a backward, of all ranks and documents.

    ``schedule`` is by default that of ``schedule_of``.

    Between two ranks messages go in this order. What is for one segment comes by position, the first of the document
    (for gradients the last) first, and before what came in earlier rounds.

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
