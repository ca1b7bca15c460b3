"""The executor: runs any plan's rounds over a process group. The only autograd code for softmax attention.

Partial outputs, lse and all gradients accumulate in float32 (float64 for float64 inputs) and are cast once at the end,
so the error against a float64 reference does not grow with the number of ranks. Every transfer is posted before the
compute that hides it.

Shapes: B batch, T local positions, H query heads, K key/value heads, D head width. q ``[B, T, H, D]``, k and v
``[B, T, K, D]``; kv is k and v stacked, ``[2, B, T, K, D]``, so that one message carries both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.attention import AttentionBackend, block_backward, block_forward, select_backend
from kernels.merge import merge_
from parallel.context.plan import Plan, Round
from parallel.context.tiles import Tile, halved

# torch 2.13 renamed these two and warns of the old names
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(eq=False)
class Executor:
    """One rank's end of a plan."""

    plan: Plan
    group: dist.ProcessGroup | None
    rank: int
    backend_name: str

    def __post_init__(self) -> None:
        self.handle = next(_handles)
        _executors[self.handle] = self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """out ``[B, T, H, D]`` in q's dtype and lse ``[B, T, H]`` in float32 or wider."""
        wide = torch.promote_types(q.dtype, torch.float32)
        backend = select_backend(self.backend_name, q.device.type, q.dtype)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)

        def attend(held: Tensor, step: Round) -> None:
            for tile in _tiles(step, backend):
                block = block_forward(q[:, tile.q], held[0][:, tile.k], held[1][:, tile.k], tile.kind, scale, backend)
                merge_(out[:, tile.q], lse[:, tile.q], *block)

        self._circulate(torch.stack((k, v)), attend)
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv in their tensors' dtypes. KV circulates again, and its gradient follows one round behind."""
        backend = select_backend(self.backend_name, q.device.type, q.dtype)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        arriving: Callable[[], Tensor] | None = None
        dkv = torch.empty(0)

        def attend(held: Tensor, step: Round) -> None:
            nonlocal arriving, dkv
            dkv = torch.zeros(held.shape, dtype=lse.dtype, device=q.device)
            for tile in _tiles(step, backend):
                gradients = _block_gradients(dout, q, held, out, lse, tile, scale, backend)
                dq[:, tile.q] += gradients[0]
                dkv[0][:, tile.k] += gradients[1]
                dkv[1][:, tile.k] += gradients[2]
            if arriving is not None:
                dkv += arriving()
            if step.send_to is not None and step.recv_from is not None:
                arriving = self._shift(dkv, step.send_to, step.recv_from)

        self._circulate(torch.stack((k, v)), attend)
        dk, dv = self._bring_home(dkv)
        return dq.to(q.dtype), dk.to(q.dtype, copy=True), dv.to(q.dtype, copy=True)  # an op's outputs share no memory

    def _circulate(self, kv: Tensor, visit: Callable[[Tensor, Round], None]) -> None:
        """Call ``visit(held_kv, round)`` for every round, the next round's KV on its way meanwhile."""
        for step in self.plan.rounds(self.rank):
            if len(step.holds) > 1:
                kv = self._gather(kv, step.holds)
            arriving = None
            if step.send_to is not None and step.recv_from is not None:
                arriving = self._shift(kv, step.send_to, step.recv_from)
            visit(kv, step)
            if arriving is not None:
                kv = arriving()

    def _shift(self, tensor: Tensor, send_to: int, recv_from: int) -> Callable[[], Tensor]:
        """Start sending a contiguous tensor on and receiving one like it; the result waits for both and returns it."""
        received = torch.empty_like(tensor)
        # No tag keeps KV and its gradient, both in flight, apart: every rank posts them in the plan's order.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=recv_from),
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=send_to),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            _ = tensor  # what is being sent lives until it has gone
            return received

        return wait

    def _gather(self, kv: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Join the KV of all ranks in ascending positions: ``[2, B, len(ranks) * T, K, D]``."""
        parts = kv.new_empty(len(ranks), *kv.shape)
        _all_gather(parts.flatten(0, 1), kv, group=self.group)  # gloo takes joined, not stacked
        joined = parts.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)  # [2, B, ranks * T, K, D]
        return joined.index_select(2, self.plan.gather_order(ranks, kv.device))

    def _bring_home(self, dkv: Tensor) -> Tensor:
        """Give each rank the gradient of its own KV, ``[2, B, T, K, D]``."""
        holds = self.plan.rounds(self.rank)[-1].holds
        if self.plan.size == 1:
            return dkv
        if len(holds) == 1:
            return self._shift(dkv, *self.plan.homecoming(self.rank))()
        by_rank = dkv.new_empty(dkv.shape)
        by_rank.index_copy_(2, self.plan.gather_order(holds, dkv.device), dkv)
        parts = by_rank.unflatten(2, (len(holds), -1)).permute(2, 0, 1, 3, 4, 5).contiguous()
        own = torch.empty_like(parts[0])
        _reduce_scatter(own, parts.flatten(0, 1), group=self.group)
        return own


def attend(executor: Executor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; differentiable. Shapes as above."""
    return torch.ops.longmesh.context_attention(q, k, v, scale, executor.handle)[0]


def _tiles(step: Round, backend: AttentionBackend) -> Iterable[Tile]:
    """The round's tiles, in the sizes that suit the kernel."""
    leaf = backend.causal_leaf
    return step.tiles if leaf is None else (part for tile in step.tiles for part in halved(tile, leaf))


def _block_gradients(
    dout: Tensor, q: Tensor, held: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float, backend: AttentionBackend
) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = tile.q, tile.k
    return block_backward(
        dout[:, rows],
        q[:, rows],
        held[0][:, keys],
        held[1][:, keys],
        out[:, rows],
        lse[:, rows],
        tile.kind,
        scale,
        backend,
    )


# A custom op takes no Python object, so it names its executor by a number. Being one op, the whole attention is a
# single node to recompute policies and to torch.compile.
_handles = count()
_executors: WeakValueDictionary[int, Executor] = WeakValueDictionary()


@torch.library.custom_op("longmesh::context_attention", mutates_args=())
def _forward_op(q: Tensor, k: Tensor, v: Tensor, scale: float, handle: int) -> tuple[Tensor, Tensor]:
    return _executors[handle].forward(q, k, v, scale)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, handle: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("longmesh::context_attention_backward", mutates_args=())
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _executors[handle].backward(dout, q, k, v, out, lse, scale)


@_backward_op.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, handle: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.handle = inputs
    ctx.executor = _executors[ctx.handle]  # alive until the backward, whoever drops it meanwhile
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.longmesh.context_attention_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.handle)
    return *gradients, None, None


_forward_op.register_autograd(_gradients, setup_context=_save)
