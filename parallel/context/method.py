"""What a context-parallel method states about itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.context.errors import ContextError


class Hop(NamedTuple):
    """One round of one rank: the ranks whose KV it holds, and where that KV goes and the next comes from."""

    holds: tuple[int, ...]
    send_to: int | None
    recv_from: int | None


@dataclass(frozen=True)
class Capabilities:
    """What a method can do. Any head counts suit a method that moves KV and splits no heads."""

    masks: tuple[str, ...] = ("causal", "full")
    teams: bool = False


class Method:
    """A layout and the rounds over it. Subclasses are data: no tensor, no process group."""

    name: str

    def layout(self, causal: bool) -> str:
        """The layout that balances this method's work under that mask."""
        raise TypeError(f"{type(self).__name__} states no layout")

    def hops(self, rank: int, size: int) -> Sequence[Hop]:
        """The rounds of ``rank``; the first holds its own KV."""
        raise TypeError(f"{type(self).__name__} states no rounds")

    def capabilities(self) -> Capabilities:
        """The masks that the method takes, and whether it has teams."""
        return Capabilities()

    def check(self, size: int, team_size: int, causal: bool) -> None:
        """Refuse what the method cannot do.

        Raises:
            ContextError: with the reason and what would work.
        """
        if size < 1:
            raise ContextError(f"context_parallel_size is {size}; it must be 1 or more")
        mask = "causal" if causal else "full"
        if mask not in self.capabilities().masks:
            raise ContextError(f"method {self.name} has no {mask} mask; it takes {self.capabilities().masks}")
        if team_size != 1 and not self.capabilities().teams:
            raise ContextError(f"method {self.name} has no teams and team_size is {team_size}; use team_size 1")


class RingMethod(Method):
    """One layout and as many rounds as ranks: round i holds the KV of rank - i and passes it to rank + 1.

    Ring Attention, section 3; the methods that pass KV round a ring differ in their layout alone.
    """

    layout_name: str

    def layout(self, causal: bool) -> str:
        return self.layout_name

    def hops(self, rank: int, size: int) -> list[Hop]:
        following, preceding = (rank + 1) % size, (rank - 1) % size
        passes = [Hop(((rank - i) % size,), following, preceding) for i in range(size - 1)]
        return [*passes, Hop((following,), None, None)]
