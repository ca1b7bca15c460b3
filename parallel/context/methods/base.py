"""Base of the context-parallel methods: layout, rounds and capabilities."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kernels.blocks import Tile
from parallel.context.layout import LAYOUTS, ContextError

Ranks = Any
"""A rank or an array of ranks: methods use arithmetic only, so that a plan computes all ranks at
once.
"""


class Shape(NamedTuple):
    """``size`` ranks that share a sequence, in teams of ``team_size``, with ``per_node`` neighbours
    per node.
    """

    size: int
    team_size: int = 1
    per_node: int = 1


class Send(NamedTuple):
    """A send to rank ``to``, which needs it in round ``due``, the next or later; the number of
    rounds: after the last.

    Per send of a round, each rank receives from one rank only: from ``source``, which a geometry
    finds.
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
        """Count the unmasked (query, key) pairs computed in this round."""
        return sum(tile.pairs for tile in self.tiles)


class Method:
    """A layout and the rounds over it. Subclasses are data: no tensor, no process group, and equal
    by their class.

    A method that moves KV and splits no heads takes any head counts.
    """

    name: str
    masks: tuple[str, ...] = ("causal", "full")
    layouts: tuple[str, ...] = LAYOUTS
    """Layouts to choose from; a single one if it defines the method."""
    teams: bool = False
    nodes: bool = False
    needed_only: bool = False
    """True if only rows that a query sees travel under any mask; otherwise under packed documents
    and windows.
    """
    splits_heads: bool = False
    states: Literal["", "neighbour", "gather"] = ""
    """Way of the states: to the next rank or by an all-gather; empty for softmax attention, which
    has none.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def layout(self, causal: bool) -> str:
        """Return the layout that defines the method, or else balances its work under this mask."""
        return self.layouts[0]

    def rounds(self, rank: Ranks, shape: Shape) -> Sequence[Round]:
        """Return the rounds of ``rank``, equally many per rank, by default one with its own KV.

        The first holds its own KV; joined KV stays joined.
        """
        return [Round((rank,), (), Send(rank, 1))]

    def team(self, rank: Ranks, shape: Shape) -> tuple[Ranks, ...]:
        """Return the ranks for whose queries ``rank`` attends: gather these before, combine partial
        results after.
        """
        return (rank,)

    def check_kind(self, called: str, attention: str, fitting: "Mapping[str, Method]") -> None:
        """Raise ContextError unless this is among the methods ``fitting`` a kind of attention."""
        if self.name not in fitting:
            passed = "states" if self.states else "keys and values"
            raise ContextError(
                f"{called}: method {self.name} passes {passed} on, which {attention} does not work by; "
                f"use one of {', '.join(fitting)}"
            )

    def check(self, shape: Shape, causal: bool) -> None:
        """Raise ContextError, with the reason and the fix, unless the method supports this shape
        and mask.
        """
        mask = "causal" if causal else "full"
        if mask not in self.masks:
            raise ContextError(f"method {self.name} has no {mask} mask; it takes {self.masks}")
        if shape.team_size != 1 and not self.teams:
            raise ContextError(
                f"method {self.name} has no teams and context_parallel_team_size is {shape.team_size}; "
                "use team_size 1, or method wallfacer"
            )


class BalancedMethod(Method):
    """A method for any layout; the default balances the mask."""

    def layout(self, causal: bool) -> str:
        return "zigzag" if causal else "contiguous"
