"""Exchange of tokens between two layouts of the same ranks, one for each kind of attention in a
hybrid model.

States pass in the fewest hops where each rank has one block of tokens; the zigzag layout balances
causal softmax attention. One all-to-all moves q, k and v into the other layout, another moves the
output back.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.context.geometry import Geometry
from parallel.context.layout import ContextError
from parallel.context.transport import Transport
from runtime.tensors import Handles


class TokenRoute(NamedTuple):
    """One rank's part in an exchange of tokens."""

    order: Tensor
    """Local indices of the rank's tokens, sorted by destination: int64 [T]."""
    sends: tuple[int, ...]
    """Tokens to send to each rank."""
    receives: tuple[int, ...]
    """Tokens to receive from each rank."""
    places: Tensor
    """New local indices of the received tokens, in order of source: int64 [T]."""


@lru_cache(maxsize=64)
def token_route(source: Geometry, target: Geometry, rank: int) -> TokenRoute:
    """Compute one rank's part in moving tokens from the layout of ``source`` to that of ``target``.

    Raises:
        ContextError: they differ in ranks or padded length.
    """
    if (source.size, source.padded_len) != (target.size, target.padded_len):
        raise ContextError(
            f"tokens cannot go from {source.padded_len} positions over {source.size} ranks to {target.padded_len} over "
            f"{target.size}; make the one plan with multiple={target.local_len}, the other's local length"
        )
    mine, theirs = _owners(target)[source.positions(rank)], _owners(source)[target.positions(rank)]
    # Positions of a rank ascend, so both sides order the tokens between two ranks alike.
    return TokenRoute(
        torch.from_numpy(np.argsort(mine, kind="stable")),
        tuple(np.bincount(mine, minlength=source.size).tolist()),
        tuple(np.bincount(theirs, minlength=source.size).tolist()),
        torch.from_numpy(np.argsort(theirs, kind="stable")),
    )


@lru_cache(maxsize=64)
def _owners(geometry: Geometry) -> np.ndarray:
    """Return the rank that owns each position."""
    found = np.empty(geometry.padded_len, dtype=np.int64)
    for rank in range(geometry.size):
        found[geometry.positions(rank)] = rank
    return found


def moved_tokens(source: Geometry, target: Geometry) -> int:
    """Return the most tokens that any rank sends to others; it receives as many."""
    return max(
        source.local_len - token_route(source, target, rank).sends[rank]
        for rank in range(source.size)
    )


class Relayout:
    """Exchange of one rank's tokens between two layouts of the same ranks."""

    def __init__(self, outside: Geometry, inside: Geometry, transport: Transport) -> None:
        """Set up both directions; ``transport`` is that of either geometry and counts the bytes."""
        self.transport = transport
        self._ways = tuple(
            token_route(*pair, transport.rank) for pair in ((outside, inside), (inside, outside))
        )
        self._placed: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self.handle = RELAYOUTS.add(self)

    def exchange(self, x: Tensor, way: int) -> Tensor:
        """Move x [B, T, ...] inward (``way`` 0), from the outer layout to the inner one, or outward
        (1).
        """
        if (
            x.device not in self._placed
        ):  # once, since a copy in a layer makes the device wait for the host
            self._placed[x.device] = [
                (way.order.to(x.device), way.places.to(x.device)) for way in self._ways
            ]
        order, places = self._placed[x.device][way]
        leaving = x.transpose(0, 1).index_select(0, order)  # [T, B, ...]
        come = self.transport.exchange_tokens(
            leaving, self._ways[way].sends, self._ways[way].receives
        )
        return torch.empty_like(come).index_copy_(0, places, come).transpose(0, 1).contiguous()


RELAYOUTS: Handles[Relayout] = Handles()
