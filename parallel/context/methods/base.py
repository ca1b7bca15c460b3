"""What a context-parallel method states about itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from parallel.context.errors import ContextError
from parallel.context.layout import LAYOUTS

Ranks = Any
"""A rank, or an array of ranks: a method does arithmetic with it alone, and a plan asks for all ranks at once."""


class Shape(NamedTuple):
    """Ranks that share a sequence: ``team_size`` of them form a team, and ``per_node`` neighbours lie in one node."""

    size: int
    team_size: int = 1
    per_node: int = 1


class Send(NamedTuple):
    """What is sent at a round to a rank, which needs it in round ``due``; if that is not the next, it has time.

    No two ranks send the same to one.
    """

    to: Ranks
    due: int


class Hop(NamedTuple):
    """One round of one rank.

    ``holds`` are the ranks whose KV is at hand, joined by an all-gather among them before the first round. It sets out
    on ``sends`` as the round starts. The round's part of its gradient follows as the round ends, together with what
    the round was sent of it, to where the same KV is held in round ``due``; after the last round, to its owner. Without
    ``gradient`` nothing is computed: the KV is merely passed on.

    In a backward that moves queries, they and their gradient take the same way.
    """

    holds: tuple[Ranks, ...]
    sends: tuple[Send, ...]
    gradient: Send | None


@dataclass(frozen=True)
class Capabilities:
    """What a method can do. Any head counts suit a method that moves KV and splits no heads."""

    masks: tuple[str, ...] = ("causal", "full")
    layouts: tuple[str, ...] = ()
    """Layouts to choose from; the one where the method is defined by its own."""
    teams: bool = False
    nodes: bool = False
    splits_heads: bool = False
    states: Literal["", "neighbour", "gather"] = ""
    """How states are passed on: to the next rank, or by an all-gather; empty for softmax attention, which has none."""


class Method:
    """A layout and the rounds over it. Subclasses are data: no tensor, no process group."""

    name: str

    def layout(self, causal: bool) -> str:
        """The layout that balances this method's work under that mask, or that the method is defined by."""
        raise TypeError(f"{type(self).__name__} states no layout")

    def hops(self, rank: Ranks, shape: Shape) -> Sequence[Hop]:
        """The rounds of ``rank``, as many for each; the first holds its own KV, and what is held jointly stays so."""
        raise TypeError(f"{type(self).__name__} states no rounds")

    def team(self, rank: Ranks, shape: Shape) -> tuple[Ranks, ...]:
        """Ranks whose queries ``rank`` attends for: gathered before, and their partial results combined after."""
        return (rank,)

    def capabilities(self) -> Capabilities:
        """The masks and layouts that the method takes, and whether it has teams, knows nodes or splits heads."""
        return Capabilities()

    def check(self, shape: Shape, causal: bool) -> None:
        """Refuse what the method cannot do.

        Raises:
            ContextError: with the reason and what would work.
        """
        mask = "causal" if causal else "full"
        if mask not in self.capabilities().masks:
            raise ContextError(f"method {self.name} has no {mask} mask; it takes {self.capabilities().masks}")
        if shape.team_size != 1 and not self.capabilities().teams:
            raise ContextError(
                f"method {self.name} has no teams and context_parallel_team_size is {shape.team_size}; "
                "use team_size 1, or method wallfacer"
            )


class RingMethod(Method):
    """One layout and as many rounds as ranks: round i holds the KV of rank - i and passes it to rank + 1.

    Ring Attention, section 3; the methods that pass KV round a ring differ in their layout alone.
    """

    layout_name: str

    def layout(self, causal: bool) -> str:
        return self.layout_name

    def capabilities(self) -> Capabilities:
        return Capabilities(layouts=(self.layout_name,))

    def hops(self, rank: Ranks, shape: Shape) -> list[Hop]:
        last, following = shape.size - 1, (rank + 1) % shape.size
        found = []
        for i in range(shape.size):
            held = (rank - i) % shape.size
            on = Send(following, i + 1)
            found.append(Hop((held,), (on,) if i < last else (), on if i < last else Send(held, i + 1)))
        return found


class BalancedMethod(Method):
    """A method for any layout: by default the one that balances the mask."""

    def layout(self, causal: bool) -> str:
        return "zigzag" if causal else "contiguous"

    def capabilities(self) -> Capabilities:
        return Capabilities(layouts=LAYOUTS)
