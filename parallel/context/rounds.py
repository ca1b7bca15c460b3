"""What a rank does in each round of a plan."""

from dataclasses import dataclass
from typing import NamedTuple

from parallel.context.tiles import Tile


class Transfer(NamedTuple):
    """Sent to one rank while another's arrives, which is needed in round ``due``; the number of rounds is their end."""

    send_to: int
    recv_from: int
    due: int


class Step(NamedTuple):
    """A ``Hop`` in the ranks of the group: whose KV is held, where it and its gradient go and come from."""

    holds: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    gradient: Transfer | None


@dataclass(frozen=True)
class Round:
    """One round of one rank: a ``Step``, and tiles that are slices of (this rank's queries, held keys).

    This rank's queries are those of its team, joined in ascending order of position, as the keys are of ``holds``
    (where several ranks hold every n-th position each, in the order of their first ones). In a backward that moves
    queries it is they that are held, and the keys are the team's.
    """

    holds: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    gradient: Transfer | None
    tiles: tuple[Tile, ...]

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs computed in this round."""
        return sum(tile.pairs for tile in self.tiles)
