"""Exchange of heads (DeepSpeed Ulysses): all-to-all from some tokens of all heads to all tokens of some, and back.

It runs in groups of U ranks. With fewer KV heads than ranks, several ranks get each head and their gradients are added.
It is an operator of its own, so that the backward has the exchanged q, k and v; so is the way back, so that recompute
can keep its result. In stages (UPipe, arXiv 2602.21196) the attention exchanges some heads at a time, there and back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import Keys, Rows
from parallel.context.executor import Executor
from parallel.context.plan import Plan
from parallel.context.transport import Tensors, Transport
from runtime.tensors import Handles


class HeadExchange:
    """Exchange of heads between one rank and others, by default its head group."""

    def __init__(self, transport: Transport, ranks: tuple[int, ...] | None = None) -> None:
        self.transport = transport
        self.ranks = ranks or transport.geometry.head_group(transport.rank)
        self.handle = _exchanges.add(self)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange [B, T, H, D] -> [B, U * T, max(1, H / U), D]; differentiable."""
        return x if len(self.ranks) == 1 else torch.ops.longmesh.tokens_to_heads(x, len(self.ranks), self.handle)

    def to_tokens(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Exchange [B, U * T, H / U, D] -> [B, T, H, D]; differentiable. ``heads`` is H, where it is less than U."""
        if len(self.ranks) == 1:
            return x
        heads = heads or x.shape[2] * len(self.ranks)
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
    return parts.transpose(0, 1).flatten(1, 2).contiguous()


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
    return joined.contiguous()


@_to_tokens.register_fake
def _(x: Tensor, heads: int, degree: int, handle: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // degree, heads, x.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *_, ctx.degree, ctx.handle = inputs
    ctx.heads, ctx.exchange = x.shape[2], _exchanges[ctx.handle]  # keep it alive until the backward


_to_heads.register_autograd(
    lambda ctx, dx: (torch.ops.longmesh.heads_to_tokens(dx, ctx.heads, ctx.degree, ctx.handle), None, None),
    setup_context=_save,
)
_to_tokens.register_autograd(
    lambda ctx, dx: (torch.ops.longmesh.tokens_to_heads(dx, ctx.degree, ctx.handle), None, None, None),
    setup_context=_save,
)


@dataclass(eq=False)
class StagedExecutor(Executor):
    """An executor that takes and returns tensors before the exchange of heads, and exchanges them in stages.

    Of U ranks each attends with H / (U * stages) query heads in a stage, so that exchanged tensors and the sums of the
    attention take 1 / stages of the memory. Nothing exchanged is kept: the backward exchanges q, k, v, out and lse
    again. Stages follow each other such that each KV head is exchanged once, for all queries that share it.
    """

    heads: HeadExchange
    stages: int

    @property
    def gathers_keys(self) -> bool:
        """Return whether attention starts with an all-gather of k and v: only once a stage's are exchanged."""
        return False

    def forward(
        self, plan: Plan, q: Tensor, keys: Keys, sinks: Tensor | None, scale: float, prefetch: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, D]`` in q's dtype and lse ``[B, T, H]`` in float32 or wider; ``sinks`` ``[H]``."""
        heads, out = self.heads, q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for keys_of, stages in self._stages(q, keys.k):
            own_keys = Keys(*(heads.to_heads(keys_of(x)) for x in keys))
            for of in stages:
                own = None if sinks is None else heads.own(of(sinks[None, None])[0, 0])
                parts = super().forward(plan, heads.to_heads(of(q)), own_keys, own, scale)
                of.put(out, heads.to_tokens(parts[0]))
                of.put(lse, heads.to_tokens(parts[1][..., None])[..., 0])
                del parts  # before the next stage allocates
        return out, lse

    def backward(self, plan: Plan, rows: Rows, keys: Keys, scale: float) -> Tensors:
        """Return dq, dk and dv in the dtypes of q, k and v."""
        heads, (q, dout, out, lse) = self.heads, rows
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, *keys))
        for keys_of, stages in self._stages(q, keys.k):
            own_keys = Keys(*(heads.to_heads(keys_of(x)) for x in keys))
            sums: list[Tensor] = []
            for of in stages:
                q_, dout_, out_, lse_ = (heads.to_heads(of(x)) for x in (q, dout, out, lse[..., None]))
                own, *parts = super().backward(plan, Rows(q_, dout_, out_, lse_[..., 0]), own_keys, scale)
                del q_, dout_, out_, lse_  # before the exchange and the next stage allocate
                sums = (
                    [a.add_(b) for a, b in zip(sums, parts, strict=True)] if sums else [x.to(lse.dtype) for x in parts]
                )
                del parts
                of.put(dq, heads.to_tokens(own.to(q.dtype)))
                del own
            for gradient, total in zip((dk, dv), sums, strict=True):
                keys_of.put(gradient, heads.to_tokens(total.to(gradient.dtype), keys_of.count))
        return dq, dk, dv

    def _stages(self, q: Tensor, k: Tensor) -> Iterator[tuple["_Heads", list["_Heads"]]]:
        """Yield KV heads that are exchanged together, and the query heads of each stage that attends to them."""
        ranks, heads, kv_heads = len(self.heads.ranks), q.shape[2], k.shape[2]
        own = max(1, kv_heads // ranks)  # KV heads of a rank; with fewer than ranks, several share one
        turns = gcd(self.stages, own)
        shared = self.stages // turns
        split = (ranks, turns, own // turns, shared, heads // (ranks * own * shared))
        for turn in range(turns):
            keys = _Heads((min(ranks, kv_heads), turns, own // turns, 1, 1), turn, 0)
            yield keys, [_Heads(split, turn, index) for index in range(shared)]


@dataclass(frozen=True)
class _Heads:
    """Some of the heads of all ranks: those at ``turn`` and ``index`` of heads split by rank, turn, KV head, index."""

    split: tuple[int, ...]
    turn: int
    index: int

    @property
    def count(self) -> int:
        return self.split[0] * self.split[2] * self.split[4]

    def __call__(self, x: Tensor) -> Tensor:
        """Take these of all heads: ``[B, T, H, ...] -> [B, T, count, ...]``."""
        return self._view(x).flatten(2, 4)

    def put(self, into: Tensor, x: Tensor) -> None:
        """Write these heads ``[B, T, count, ...]`` into their places in all of them."""
        view = self._view(into)
        view.copy_(x.view_as(view))

    def _view(self, x: Tensor) -> Tensor:
        return x.unflatten(2, self.split).select(5, self.index).select(3, self.turn)
