"""Base of the context-parallel methods: layout, rounds and capabilities.

A method is data: who holds whose KV in which round, and who sends it on. It sees no tensor, no
process group and no mask, so the executor, the planner's cost model and the tests that check a
method all read the same few lines, and none can disagree with the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kernels.blocks import Tile
from parallel.context.layout import LAYOUTS, ContextError
from runtime.errors import divisors

Ranks = Any
"""A rank, or an array of ranks: methods use only arithmetic, so that one call computes all ranks.
"""


class Shape(NamedTuple):
    """Numbers of ranks: all that share a sequence, those of a team, and those of a node."""

    size: int
    team_size: int = 1
    per_node: int = 1


class Send(NamedTuple):
    """A send to rank ``to``, which needs it in round ``due``, the next or later.

    ``due`` equal to the number of rounds means after the last. Per send of a round, each rank
    receives from one rank only: from ``source``, which a geometry fills in.
    """

    to: Ranks
    due: int
    source: Ranks = None


class Round(NamedTuple):
    """One round of one rank, or of all at once, without tiles.

    The rank has the KV of ranks ``holds``, which these all-gathered before the first round, and
    starts ``sends`` of it as the round starts. At the round's end it adds the gradient it received
    to the round's own and sends the sum to where the same KV is held in round ``due``; after the
    last round, to its owner. Without ``gradient`` the round only passes KV on and computes nothing.

    Tiles pair this rank's queries, which are its team's, joined in ascending positions, with the
    keys of ``holds`` (ranks that each hold every n-th position: in the order of their first ones).
    A backward that moves queries holds queries, the keys are the team's, and queries and their
    gradient go the same way.
    """

    holds: tuple[Ranks, ...]
    sends: tuple[Send, ...]
    gradient: Send | None
    tiles: tuple[Tile, ...] = ()

    @property
    def pairs(self) -> int:
        """Number of unmasked (query, key) pairs computed in this round."""
        return sum(tile.pairs for tile in self.tiles)


class Method:
    """A layout and the rounds over it; methods of one class are equal.

    A method that moves KV and splits no heads takes any head counts.
    """

    name: str
    masks: tuple[str, ...] = ("causal", "full")
    layouts: tuple[str, ...] = LAYOUTS
    """Layouts to choose from; a single one if the layout defines the method."""
    teams: bool = False
    nodes: bool = False
    """True if the rounds depend on nodes, which must have equally many ranks."""
    needed_only: bool = False
    """True if only rows that a query sees travel under any mask; if False, only under packed
    documents and windows.
    """
    splits_heads: bool = False
    states: Literal["", "neighbour", "gather"] = ""
    """Way of the states: to the next rank, or an all-gather; empty for softmax attention."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def layout(self, causal: bool) -> str:
        """Return the method's only layout, or among several the one that balances this mask."""
        return self.layouts[0]

    def rounds(self, rank: Ranks, shape: Shape) -> Sequence[Round]:
        """Return the rounds of ``rank``, equally many per rank; by default one, with its own KV.

        The first round holds the rank's own KV; joined KV stays joined.
        """
        return [Round((rank,), (), Send(rank, 1))]

    def team(self, rank: Ranks, shape: Shape) -> tuple[Ranks, ...]:
        """Return the ranks for whose queries ``rank`` computes attention.

        Their queries are gathered before the rounds, and partial results combined after.
        """
        return (rank,)

    def check_kind(self, called: str, attention: str, fitting: "Mapping[str, Method]") -> None:
        """Raise ContextError unless this method is in ``fitting``, those for this attention.

        Args:
            called: the function that the user called, for the message.
        """
        if self.name not in fitting:
            operands = "states" if self.states else "keys and values"
            raise ContextError(
                f"{called}: method {self.name} passes {operands} on, which {attention} does not "
                f"work by; use one of {', '.join(fitting)}"
            )

    def check(self, shape: Shape, causal: bool) -> None:
        """Raise ContextError unless the method supports this shape and mask."""
        mask = "causal" if causal else "full"
        if mask not in self.masks:
            raise ContextError(f"method {self.name} has no {mask} mask; it takes {self.masks}")
        if shape.team_size != 1 and not self.teams:
            raise ContextError(
                f"method {self.name} has no teams, but context_parallel_team_size is "
                f"{shape.team_size}; use team_size 1, or method wallfacer"
            )
        if self.nodes and shape.size % shape.per_node:
            raise ContextError(
                f"context_parallel_ranks_per_node makes nodes of {shape.per_node} in {self.name}, "
                f"which does not divide the {shape.size} ranks (or groups of ulysses_degree "
                f"ranks); sizes that do: {', '.join(map(str, divisors(shape.size)))}"
            )


class BalancedMethod(Method):
    """A method that supports any layout; by default it takes the one that balances the mask."""

    def layout(self, causal: bool) -> str:
        return "zigzag" if causal else "contiguous"
