"""One round of one rank where whole tensors travel."""

from dataclasses import dataclass

from kernels.tiles import Tile
from parallel.context.geometry import Transfer


@dataclass(frozen=True)
class Round:
    """One round of one rank: a ``Step``, and tiles as slices of (this rank's queries, held keys).

    This rank's queries are its team's, joined in ascending positions, as are the keys of ``holds`` (ranks that each
    hold every n-th position: in the order of their first ones). A backward that moves queries holds queries, and the
    keys are the team's.
    """

    holds: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    gradient: Transfer | None
    tiles: tuple[Tile, ...]

    @property
    def pairs(self) -> int:
        """Count the unmasked (query, key) pairs computed in this round."""
        return sum(tile.pairs for tile in self.tiles)
