"""Exchange of tokens between two layouts of the same ranks, for hybrid models.

Each kind of attention has a layout that suits it: states pass in the fewest hops if each rank has
one block of tokens, and the zigzag layout balances causal softmax attention. One all-to-all moves
q, k and v into the other layout, and another moves the output back.
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
    """Number of tokens to send to each rank."""
    receives: tuple[int, ...]
    """Number of tokens to receive from each rank."""
    targets: Tensor
    """New local indices of the received tokens, ordered by source rank: int64 [T]."""


@lru_cache(maxsize=64)
def token_route(source: Geometry, target: Geometry, rank: int) -> TokenRoute:
    """Compute one rank's part in moving tokens from the ``source`` layout to the ``target`` layout.

    Raises:
        ContextError: the layouts differ in their number of ranks or padded length.
    """
    if (source.size, source.padded_len) != (target.size, target.padded_len):
        raise ContextError(
            f"tokens cannot move from {source.padded_len} positions over {source.size} ranks to "
            f"{target.padded_len} positions over {target.size} ranks; make the first plan with "
            f"multiple={target.local_len}, the local length of the second"
        )
    # Positions of a rank ascend, so sender and receiver list the tokens that one sends to the other
    # in the same order.
    destination = _owners(target)[source.positions(rank)]  # new owner of each token held before
    origin = _owners(source)[target.positions(rank)]  # old owner of each token held afterwards
    return TokenRoute(
        order=torch.from_numpy(np.argsort(destination, kind="stable")),
        sends=tuple(np.bincount(destination, minlength=source.size).tolist()),
        receives=tuple(np.bincount(origin, minlength=source.size).tolist()),
        targets=torch.from_numpy(np.argsort(origin, kind="stable")),
    )


@lru_cache(maxsize=64)
def _owners(geometry: Geometry) -> np.ndarray:
    """Return the rank that owns each position."""
    owners = np.empty(geometry.padded_len, dtype=np.int64)
    for rank in range(geometry.size):
        owners[geometry.positions(rank)] = rank
    return owners


def moved_tokens(source: Geometry, target: Geometry) -> int:
    """Return the largest number of tokens that a rank sends to others; it receives as many."""
    max_tokens = 0
    for rank in range(source.size):
        stationary = token_route(source, target, rank).sends[rank]
        max_tokens = max(max_tokens, source.local_len - stationary)
    return max_tokens


class Relayout:
    """Exchange of one rank's tokens between two layouts of the same ranks."""

    def __init__(self, outside: Geometry, inside: Geometry, transport: Transport) -> None:
        """Set up both directions; ``transport``, of either geometry, moves and counts the bytes."""
        self.transport = transport
        self._routes = (
            token_route(outside, inside, transport.rank),
            token_route(inside, outside, transport.rank),
        )
        self._indices: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self.handle = RELAYOUTS.add(self)

    def exchange(self, x: Tensor, direction: int) -> Tensor:
        """Move x [B, T, ...] from the outer layout to the inner layout, or back.

        Args:
            direction: 0 for inward, 1 for outward.
        """
        if x.device not in self._indices:
            # Copy the indices to the device once: a copy in each layer would make the device wait
            # for the host.
            self._indices[x.device] = [
                (route.order.to(x.device), route.targets.to(x.device)) for route in self._routes
            ]
        order, targets = self._indices[x.device][direction]
        route = self._routes[direction]
        leaving = x.transpose(0, 1).index_select(0, order)  # [T, B, ...]
        arrived = self.transport.exchange_tokens(leaving, route.sends, route.receives)
        sorted_tokens = torch.empty_like(arrived).index_copy_(0, targets, arrived)
        return sorted_tokens.transpose(0, 1).contiguous()  # [B, T, ...]


RELAYOUTS: Handles[Relayout] = Handles()
