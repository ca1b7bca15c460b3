"""The exchange of tokens between two layouts of the same ranks, so that two kinds of attention have each their own.

The states of linear attention need consecutive tokens on each rank; softmax attention under a causal mask is balanced
in the zigzag layout. One all-to-all brings q, k and v from the one into the other, and one brings the output back.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.context.api import ContextParallel
from parallel.context.errors import ContextError
from parallel.context.geometry import Geometry
from parallel.context.transport import Transport
from runtime.handles import Handles


class Moves(NamedTuple):
    """What one rank does in an exchange of tokens."""

    order: Tensor
    """Its tokens by the rank that they go to, int64 [T]: index into those that it has."""
    sends: tuple[int, ...]
    """How many go to each rank."""
    receives: tuple[int, ...]
    """How many come from each rank."""
    places: Tensor
    """Where those that come, joined by rank, belong among those that it then has: int64 [T]."""


@lru_cache(maxsize=64)
def moves(source: Geometry, target: Geometry, rank: int) -> Moves:
    """From the layout of one geometry to that of another, by the ranks' positions alone.

    Raises:
        ContextError: they differ in ranks or in padded length.
    """
    if (source.size, source.padded_len) != (target.size, target.padded_len):
        raise ContextError(
            f"tokens cannot go from {source.padded_len} positions over {source.size} ranks to {target.padded_len} over "
            f"{target.size}; make the one plan with multiple={target.local_len}, the other's local length"
        )
    mine, theirs = _owners(target)[source.positions(rank)], _owners(source)[target.positions(rank)]
    # Each rank's positions ascend, and both sides keep that order among the tokens of two ranks.
    return Moves(
        torch.from_numpy(np.argsort(mine, kind="stable")),
        tuple(np.bincount(mine, minlength=source.size).tolist()),
        tuple(np.bincount(theirs, minlength=source.size).tolist()),
        torch.from_numpy(np.argsort(theirs, kind="stable")),
    )


@lru_cache(maxsize=64)
def _owners(geometry: Geometry) -> np.ndarray:
    """The rank that has each position."""
    found = np.empty(geometry.padded_len, dtype=np.int64)
    for rank in range(geometry.size):
        found[geometry.positions(rank)] = rank
    return found


def moved_tokens(source: Geometry, target: Geometry) -> int:
    """Tokens that the rank with most of them sends to others; as many come back."""
    return max(source.local_len - moves(source, target, rank).sends[rank] for rank in range(source.size))


class Relayout:
    """One rank's exchanges between two layouts of the same ranks."""

    def __init__(self, outside: Geometry, inside: Geometry, transport: Transport) -> None:
        """``transport`` is that of either, and counts the bytes."""
        self.transport = transport
        self._ways = tuple(moves(*pair, transport.rank) for pair in ((outside, inside), (inside, outside)))
        self.handle = _exchanges.add(self)

    def inward(self, x: Tensor) -> Tensor:
        """x [B, T, ...] of this rank's tokens in the outer layout -> of those in the inner one; differentiable."""
        return torch.ops.longmesh.relayout_in(x, self.handle)

    def outward(self, x: Tensor) -> Tensor:
        """The way back."""
        return torch.ops.longmesh.relayout_out(x, self.handle)

    def exchange(self, x: Tensor, way: int) -> Tensor:
        """Way 0 is inward, 1 outward."""
        order, sends, receives, places = self._ways[way]
        leaving = x.transpose(0, 1).index_select(0, order.to(x.device))  # [T, B, ...]
        come = self.transport.exchange_tokens(leaving, sends, receives)
        return torch.empty_like(come).index_copy_(0, places.to(x.device), come).transpose(0, 1).contiguous()


def attend_inside(inside: ContextParallel, outside: ContextParallel) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The softmax attention of ``inside`` for tensors in the layout of ``outside``, over the same ranks.

    Where the layouts are one, nothing is exchanged.

    Raises:
        ContextError: as ``moves``.
    """
    geometries = outside.plan.geometry, inside.plan.geometry
    if geometries[0].layout == geometries[1].layout:
        return inside.attend
    relayout = Relayout(*geometries, inside.transport)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.shape[2] for x in (q, k, v)]
        q, k, v = relayout.inward(torch.cat((q, k, v), 2)).split(heads, 2)  # one exchange for the three
        return relayout.outward(inside.attend(q.contiguous(), k.contiguous(), v.contiguous()))

    return attend


# As the exchange of heads (parallel/context/heads.py): operators, of which recompute policies can keep the second.
_exchanges: Handles[Relayout] = Handles()


@torch.library.custom_op("longmesh::relayout_in", mutates_args=())
def _inward(x: Tensor, handle: int) -> Tensor:
    return _exchanges[handle].exchange(x, 0)


@torch.library.custom_op("longmesh::relayout_out", mutates_args=())
def _outward(x: Tensor, handle: int) -> Tensor:
    return _exchanges[handle].exchange(x, 1)


_inward.register_fake(lambda x, handle: x.new_empty(x.shape))
_outward.register_fake(lambda x, handle: x.new_empty(x.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.handle = inputs
    ctx.exchange = _exchanges[ctx.handle]  # alive until the backward, whoever drops it meanwhile


# Every token has one place in either layout, so that the way back is the transpose.
_inward.register_autograd(lambda ctx, dx: (torch.ops.longmesh.relayout_out(dx, ctx.handle), None), setup_context=_save)
_outward.register_autograd(lambda ctx, dx: (torch.ops.longmesh.relayout_in(dx, ctx.handle), None), setup_context=_save)
