"""LASP (Sun et al. 2024) and LASP-2 (2025): linear attention, whose ranks pass one state on instead of keys and values.

A rank's tokens follow those of the rank before it, so that what it needs of all of these is the state after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from parallel.context.methods.base import Capabilities, Hop, Method, Ranks, Send, Shape

if TYPE_CHECKING:
    from parallel.context.plan import Plan


class StateMethod(Method):
    """Contiguous tokens, no keys or values that move; the states do, on the way that ``capabilities`` names."""

    def layout(self, causal: bool) -> str:
        return "contiguous"

    def hops(self, rank: Ranks, shape: Shape) -> Sequence[Hop]:
        return [Hop((rank,), (), Send(rank, 1))]


class Lasp(StateMethod):
    """From neighbour to neighbour: the state of rank - 1 comes in, and goes on to rank + 1 with this rank's added."""

    name = "lasp"

    def capabilities(self) -> Capabilities:
        return Capabilities(masks=("causal",), layouts=("contiguous",), states="neighbour")


class Lasp2(StateMethod):
    """One all-gather of what every rank adds; each rank then sums what precedes it."""

    name = "lasp2"

    def capabilities(self) -> Capabilities:
        return Capabilities(masks=("causal",), layouts=("contiguous",), states="gather")


@dataclass(frozen=True)
class Passage:
    """What becomes of the state at one rank; backwards in time, of its gradient."""

    source: int | None
    """The rank it comes from; None at the sequence's end, or where a document ends between the two."""
    target: int | None
    """The rank that it goes on to."""
    goes_through: bool
    """Whether what comes in reaches the other end: no document ends inside."""
    seen: int
    """How many tokens see what comes in: those of the first document, or backwards of the last."""
    documents: tuple[int, ...] | None
    """Cumulative lengths of the parts of documents that lie here; None for one."""


@lru_cache(maxsize=256)
def passages(plan: "Plan", reverse: bool = False) -> tuple[Passage, ...]:
    """What every rank does with the state, forwards, or backwards with its gradient. Padding is a document."""
    length, starts = plan.local_len, plan.boundaries

    def after(rank: int) -> int | None:
        """The next rank, where it goes on with this one's last document."""
        end = (rank + 1) * length
        return rank + 1 if 0 <= rank < plan.size - 1 and end not in starts else None

    found = []
    for rank in range(plan.size):
        inside = tuple(start - rank * length for start in starts if 0 < start - rank * length < length)
        bounds = (0, *inside, length)
        ends = None if after(rank - 1) is None else rank - 1, after(rank)
        source, target = reversed(ends) if reverse else ends
        seen = bounds[-1] - bounds[-2] if reverse else bounds[1]
        found.append(Passage(source, target, not inside, seen, bounds if inside else None))
    return tuple(found)
