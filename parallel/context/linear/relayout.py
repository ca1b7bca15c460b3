"""Exchange of tokens between two layouts of the same ranks, one for each kind of attention in a hybrid model.

States pass in the fewest hops where each rank has one block of tokens; the zigzag layout balances causal softmax
attention. One all-to-all moves q, k and v into the other layout, another moves the output back.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from parallel.context.api import ContextParallel
from parallel.context.geometry import Geometry
from parallel.context.layout import ContextError
from parallel.context.plan import PLANS, Plan, PlanHandle
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
    return max(source.local_len - token_route(source, target, rank).sends[rank] for rank in range(source.size))


class Relayout:
    """Exchange of one rank's tokens between two layouts of the same ranks."""

    def __init__(self, outside: Geometry, inside: Geometry, transport: Transport) -> None:
        """Set up both directions; ``transport`` is that of either geometry and counts the bytes."""
        self.transport = transport
        self._ways = tuple(token_route(*pair, transport.rank) for pair in ((outside, inside), (inside, outside)))
        self._placed: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self.handle = _exchanges.add(self)

    def inward(self, x: Tensor) -> Tensor:
        """Move x [B, T, ...] from the outer layout to the inner one; differentiable."""
        return torch.ops.longmesh.relayout_in(x, self.handle)

    def outward(self, x: Tensor) -> Tensor:
        """Move x [B, T, ...] from the inner layout to the outer one; differentiable."""
        return torch.ops.longmesh.relayout_out(x, self.handle)

    def exchange(self, x: Tensor, way: int) -> Tensor:
        """Exchange tokens; ``way`` 0 is inward, 1 outward."""
        if x.device not in self._placed:  # once, since a copy in a layer makes the device wait for the host
            self._placed[x.device] = [(way.order.to(x.device), way.places.to(x.device)) for way in self._ways]
        order, places = self._placed[x.device][way]
        leaving = x.transpose(0, 1).index_select(0, order)  # [T, B, ...]
        come = self.transport.exchange_tokens(leaving, self._ways[way].sends, self._ways[way].receives)
        return torch.empty_like(come).index_copy_(0, places, come).transpose(0, 1).contiguous()


class InsideAttention:
    """The softmax attention of ``inside`` for tensors and masks of ``outside``, over the same ranks.

    Equal layouts need no exchange.
    """

    def __init__(self, inside: ContextParallel, outside: ContextParallel) -> None:
        """Raise ContextError as ``token_route`` does."""
        geometries = outside.plan.geometry, inside.plan.geometry
        equal = geometries[0].layout == geometries[1].layout
        self.inside = inside
        self._relayout = None if equal else Relayout(*geometries, inside.transport)
        self._masked: WeakKeyDictionary[Plan, ContextParallel] = WeakKeyDictionary()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **settings: Any) -> Tensor:
        """Return the attention, as ``SoftmaxAttention`` does; ``mask`` is a handle of ``outside``."""
        mask = None if mask is None else self.own(mask)
        if self._relayout is None:
            return self.inside.attend(q, k, v, mask, **settings)
        heads = [x.shape[2] for x in (q, k, v)]
        q, k, v = self._relayout.inward(torch.cat((q, k, v), 2)).split(heads, 2)  # one exchange for all three
        out = self.inside.attend(q.contiguous(), k.contiguous(), v.contiguous(), mask, **settings)
        return self._relayout.outward(out)

    def prefetch_kv(
        self, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **settings: Any
    ) -> Callable[[Tensor], Tensor]:
        """Do as ``SoftmaxAttention.prefetch_kv``; between two layouts nothing starts before q is there."""
        if self._relayout is None:
            own = None if mask is None else self.own(mask)
            return self.inside.attend.prefetch_kv(k, v, own, **settings)
        return lambda q: self(q, k, v, mask, **settings)

    def own(self, mask: PlanHandle) -> PlanHandle:
        """Return the handle of ``inside`` for the documents of a handle of ``outside``; it lives as long as that."""
        plan = PLANS[mask.tensor]
        return mask if plan.geometry == self.inside.plan.geometry else self.under(plan).handle

    def under(self, plan: Plan) -> ContextParallel:
        """Return ``inside`` under the documents of a plan of ``outside``; made once for a plan of another geometry."""
        inside = self.inside
        if plan.geometry == inside.plan.geometry:  # the same plan, which must not keep itself alive
            return inside.under(documents=plan.documents, window=plan.mask.window)
        if plan not in self._masked:
            self._masked[plan] = inside.under(documents=plan.documents, window=inside.plan.mask.window)
        return self._masked[plan]


# Operators, as in parallel/context/transport.py, so that recompute policies can keep the second's result.
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
    ctx.exchange = _exchanges[ctx.handle]  # keep it alive until the backward


# A permutation of tokens: its transpose is the way back.
_inward.register_autograd(lambda ctx, dx: (torch.ops.longmesh.relayout_out(dx, ctx.handle), None), setup_context=_save)
_outward.register_autograd(lambda ctx, dx: (torch.ops.longmesh.relayout_in(dx, ctx.handle), None), setup_context=_save)
