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
"""A rank, or an array of ranks: methods use only arithmetic, so one call can compute all ranks.
"""


class Shape(NamedTuple):
    """Numbers of ranks that share a sequence, a team and a node."""

    size: int
    team_size: int = 1
    per_node: int = 1


class Send(NamedTuple):
    """A send to rank ``to``, needed there in round ``due``: the next round or a later one.

    ``due`` equal to the number of rounds means after the last round. For each send of a round,
    every rank also receives from exactly one rank, ``source``, which a geometry fills in.
    """

    to: Ranks
    due: int
    source: Ranks = None


class Round(NamedTuple):
    """One round of one rank; or of all ranks at once, and then without tiles.

    ``holds``: ranks whose KV this rank has during the round. If there are several, they gathered
    their KV before the first round.

    ``sends``: sends of that KV, started when the round begins.

    ``gradient``: send of the KV's gradient at the end of the round, after this round's part is
    added to the part received. It goes to the rank that holds the same KV in round
    ``gradient.due`` or, after the last round, to the owner. None if the round only passes KV on and
    computes nothing.

    ``tiles``: visible blocks of the queries of this rank's team and the keys of ``holds``. Both are
    concatenated by ascending positions (striped ranks, by their first positions).

    In a backward pass that moves queries, ``holds`` are the ranks whose queries visit, the keys are
    the team's, and queries and their gradient are sent just like KV and its gradient.
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
    """A method: its layouts, its rounds and what it supports.

    Two objects of one class are equal. A method that moves KV and does not split heads supports any
    number of heads.
    """

    name: str
    masks: tuple[str, ...] = ("causal", "full")
    layouts: tuple[str, ...] = LAYOUTS
    """Layouts to choose from; a single one if the layout defines the method."""
    teams: bool = False
    nodes: bool = False
    """True if the rounds depend on nodes, which must all have the same number of ranks."""
    needed_only: bool = False
    """True if the method sends only the rows that some query sees, under every mask. If False, it
    does so only for packed documents, windows and the layout ``balanced``, and otherwise sends
    whole tensors.
    """
    splits_heads: bool = False
    in_slices: str = ""
    """Name of the method in its place if layers take the sequence in slices: itself, if KV stay on
    their rank after an exchange of heads; empty if there is none."""
    for_slices_only: bool = False
    """True if another method sends less without slices, so that no search needs this one."""
    states: Literal["", "neighbour", "gather"] = ""
    """Communication of states: to the next rank, or an all-gather; empty if no states travel."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @property
    def takes_slices(self) -> bool:
        """True if layers that take the sequence in slices can run with this method."""
        return bool(self.in_slices) and self.in_slices == self.name

    def layout(self, causal: bool) -> str:
        """Return the method's only layout, or among several the one that balances this mask."""
        return self.layouts[0]

    def rounds(self, rank: Ranks, shape: Shape) -> Sequence[Round]:
        """Return the rounds of ``rank``; by default one round, with the rank's own KV.

        All ranks have the same number of rounds. In the first round a rank has its own KV, maybe
        together with that of other ranks; KV that was gathered together also travels together.
        """
        return [Round((rank,), (), Send(rank, 1))]

    def team(self, rank: Ranks, shape: Shape) -> tuple[Ranks, ...]:
        """Return the ranks for which ``rank`` computes attention.

        Their queries are gathered before the rounds, and partial results are combined afterwards.
        """
        return (rank,)

    def check_kind(self, called: str, attention: str, fitting: "Mapping[str, Method]") -> None:
        """Raise ContextError unless this method is in ``fitting``, the methods for this attention.

        Args:
            called: the function that the user called, for the message.
        """
        if self.name not in fitting:
            operands = "states" if self.states else "keys and values"
            raise ContextError(
                f"{called}: method {self.name} passes {operands} on, but {attention} does not work "
                f"this way; use one of {', '.join(fitting)}"
            )

    def check(self, shape: Shape, causal: bool) -> None:
        """Raise ContextError unless the method supports this shape and mask."""
        mask = "causal" if causal else "full"
        if mask not in self.masks:
            raise ContextError(
                f"method {self.name} does not support a {mask} mask (its masks: {self.masks}); "
                "use another method"
            )
        if shape.team_size != 1 and not self.teams:
            raise ContextError(
                f"method {self.name} has no teams, but context_parallel_team_size is "
                f"{shape.team_size}; set context_parallel_team_size to 1, or use method wallfacer"
            )
        if self.nodes and shape.size % shape.per_node:
            raise ContextError(
                f"context_parallel_ranks_per_node makes nodes of {shape.per_node} ranks for method "
                f"{self.name}, but that does not divide the {shape.size} ranks (or groups of "
                f"ulysses_degree ranks); sizes that do: {', '.join(map(str, divisors(shape.size)))}"
            )


class BalancedMethod(Method):
    """A method for any layout; by default it takes the layout that balances the mask."""

    def layout(self, causal: bool) -> str:
        return "zigzag" if causal else "contiguous"
