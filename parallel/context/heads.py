"""Exchange of heads (DeepSpeed Ulysses): all-to-all from some tokens of all heads to all tokens of some, and back.

It runs in groups of U ranks. With fewer KV heads than ranks, several ranks get each head and their gradients are added.
It is an operator of its own, so that the backward has the exchanged q, k and v; so is the way back, so that recompute
can keep its result.
"""

from typing import Any

import torch
from torch import Tensor

from parallel.context.transport import Transport
from runtime.handles import Handles


class HeadExchange:
    """Exchange of heads between one rank and its head group."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.ranks = transport.geometry.head_group(transport.rank)
        self.handle = _exchanges.add(self)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange [B, T, H, D] -> [B, U * T, max(1, H / U), D]; differentiable."""
        return x if len(self.ranks) == 1 else torch.ops.longmesh.tokens_to_heads(x, len(self.ranks), self.handle)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange [B, U * T, H / U, D] -> [B, T, H, D]; differentiable."""
        if len(self.ranks) == 1:
            return x
        heads = x.shape[2] * len(self.ranks)
        return torch.ops.longmesh.heads_to_tokens(x, heads, len(self.ranks), self.handle)

    def own(self, x: Tensor) -> Tensor:
        """Return the part of x [H] of the heads that this rank attends with; differentiable."""
        return x.chunk(len(self.ranks))[self.ranks.index(self.transport.rank)]


_exchanges: Handles[HeadExchange] = Handles()


@torch.library.custom_op("longmesh::tokens_to_heads", mutates_args=())
def _to_heads(x: Tensor, degree: int, handle: int) -> Tensor:
    copies = max(1, degree // x.shape[2])
    parts = x.repeat_interleave(copies, 2).unflatten(2, (degree, -1)) if copies > 1 else x.unflatten(2, (degree, -1))
    exchange = _exchanges[handle]
    parts = exchange.transport.exchange(parts.permute(2, 0, 1, 3, 4), exchange.ranks)  # [U, B, T, H / U, D]
    return parts.transpose(0, 1).flatten(1, 2).clone(memory_format=torch.contiguous_format)


@_to_heads.register_fake
def _(x: Tensor, degree: int, handle: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * degree, max(1, x.shape[2] // degree), x.shape[3])


@torch.library.custom_op("longmesh::heads_to_tokens", mutates_args=())
def _to_tokens(x: Tensor, heads: int, degree: int, handle: int) -> Tensor:
    """Exchange back; with fewer ``heads`` than ranks, add the parts of each head: they are gradients."""
    exchange = _exchanges[handle]
    parts = exchange.transport.exchange(x.unflatten(1, (degree, -1)).transpose(0, 1), exchange.ranks)
    joined = parts.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, T, heads, D]
    if joined.shape[2] > heads:
        wide = torch.promote_types(x.dtype, torch.float32)
        return joined.unflatten(2, (heads, -1)).sum(3, dtype=wide).to(x.dtype)
    return joined.clone(memory_format=torch.contiguous_format)


@_to_tokens.register_fake
def _(x: Tensor, heads: int, degree: int, handle: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // degree, heads, x.shape[3])


def _save_heads(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.degree, ctx.handle = inputs
    ctx.heads, ctx.exchange = x.shape[2], _exchanges[ctx.handle]  # keep it alive until the backward


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.degree, ctx.handle = inputs
    ctx.exchange = _exchanges[ctx.handle]


_to_heads.register_autograd(
    lambda ctx, dx: (torch.ops.longmesh.heads_to_tokens(dx, ctx.heads, ctx.degree, ctx.handle), None, None),
    setup_context=_save_heads,
)
_to_tokens.register_autograd(
    lambda ctx, dx: (torch.ops.longmesh.tokens_to_heads(dx, ctx.degree, ctx.handle), None, None, None),
    setup_context=_save_tokens,
)
