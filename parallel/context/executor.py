"""Executor: run a plan's rounds over a process group, forward and backward.

Partial outputs, lse and all gradients accumulate in float32 (float64 for float64 inputs, and lse on
the CPU) and are cast once at the end, so the error against a float64 reference does not grow with
the number of ranks. Every transfer is posted before the compute that hides it.

Shapes: B batch, T local positions, H query heads, K key/value heads, D head width. q ``[B, T, H,
D]``, k and v ``[B, T, K, D]``. With Ulysses, T, H and K are those after the exchange of heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import gcd

import torch
from torch import Tensor

from kernels.attention import (
    add_gradients_,
    attend_tiles_,
    block_backward,
    block_forward,
    empty_results,
    only_block,
    select_backend,
)
from kernels.backends.base import SIMULATED_KERNEL, AttentionKernel
from kernels.blocks import Keys, Rows, Tile, merged, with_sinks
from parallel.context.circulation import Needed, Whole
from parallel.context.layout import ContextError
from parallel.context.plan import Plan
from parallel.context.traffic import Moves, Sizes
from parallel.context.transport import Arrival, HeadExchange, Tensors, Transport
from runtime.tensors import Handles


@dataclass(eq=False)
class Executor:
    """Softmax attention of one rank, for any plan of one geometry."""

    transport: Transport
    backend_name: str

    def __post_init__(self) -> None:
        self.handle = EXECUTORS.add(self)
        self.geometry, self.rank = self.transport.geometry, self.transport.rank
        self._holders, self._team = (
            self.geometry.holders(self.rank),
            self.geometry.teammates(self.rank),
        )
        self._alone = (
            self.geometry.size == self.geometry.ulysses_degree
        )  # no other rank attends to the same heads
        self._prefetched: tuple[int, Arrival] | None = None

    @property
    def gathers_keys(self) -> bool:
        """Return whether attention starts with an all-gather of k and v."""
        return len(self._holders) > 1

    def prefetch_kv(self, k: Tensor, v: Tensor) -> int:
        """Start gathering k and v; return the handle to pass to the next ``forward``."""
        self._take(None)
        self._prefetched = next(_prefetches), self.transport.gather((k, v), self._holders)
        return self._prefetched[0]

    def forward(
        self,
        plan: Plan,
        q: Tensor,
        keys: Keys,
        sinks: Tensor | None,
        scale: float,
        prefetch: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, D]`` in q's dtype and lse ``[B, T, H]`` in float32 or wider;
        ``sinks`` ``[H]``.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        backend = self._backend(plan, q)
        rows = (q.shape[0], q.shape[1] * len(self._team), q.shape[2])  # of the whole team
        results: Tensors = ()
        circulation = self._circulation(plan, keys, "kv", self._take(prefetch))
        staying = self.transport.gather((q,), self._team)
        stays: Tensors = ()
        for _, tiles, (k, v) in circulation.visits():
            (queries,) = stays = stays or staying()
            if not results and (tile := only_block(tiles, rows[1], None, backend)):
                results = block_forward(
                    queries, k[:, tile.k], v[:, tile.k], tile.kind, scale, backend
                )
            else:
                # Rounding lse scales the weights of its whole row, which the gradients of norms of
                # q and k do not average out, and each merge would round it once more. GPUs' kernels
                # have float32.
                out, lse = results or empty_results(rows, q, wide)
                exact = torch.float64 if lse.device.type == "cpu" else wide
                results = out, lse = *_dense((out,), wide), *_dense((lse,), exact)
                attend_tiles_(out, lse, queries, Keys(k, v), tiles, scale, backend)
            del k, v  # free them before the next round allocates
        if not stays:
            staying()  # all tokens here are padding
        final = len(self._team) == 1 and sinks is None
        out, lse = _dense(results, None if final else wide) or empty_results(rows, q, wide)
        lse = lse.to(wide)
        if len(self._team) > 1:
            out, lse = merged(
                *(self.transport.scatter(partial, self._team) for partial in (out, lse))
            )
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return out.to(q.dtype), lse

    def backward(self, plan: Plan, rows: Rows, keys: Keys, scale: float) -> Tensors:
        """Return dq, dk and dv in float32 or wider; what one block alone gives, as its kernel
        returns it.

        KV or queries circulate; their gradient follows one round behind, or as the plan says. The
        other stays, with its gradient.
        """
        backend, wide = self._backend(plan, rows.q), rows.lse.dtype
        batch, tokens, heads, width = rows.q.shape
        of = Sizes(batch, tokens, heads, keys.k.shape[2], width, rows.q.element_size())
        moves = plan.backward_moves(of)
        moving, still = (keys, rows) if moves == "kv" else (rows, keys)
        circulation = self._circulation(plan, moving, moves, None)
        staying = self.transport.gather(still, self._team)
        stays: Tensors = ()
        kept: Tensors = ()
        for i, tiles, held in circulation.visits():
            stays = stays or staying()
            kept, moved = self._of_round(tiles, stays, held, kept, moves, wide, scale, backend)
            circulation.send_gradient(i, moved)
            del held, moved  # free them before the next round allocates
        brought = circulation.own_gradient() or _zeros(moving, wide)
        kept = kept or _zeros(staying(), wide)  # tokens that nothing sees: padding
        if len(self._team) > 1:
            kept = tuple(self.transport.reduced(x, self._team) for x in _dense(kept, wide))
        return (*kept, *brought) if moves == "kv" else (*brought, *kept)

    def _of_round(
        self,
        tiles: tuple[Tile, ...],
        stays: Tensors,
        held: Tensors,
        kept: Tensors,
        moves: Moves,
        wide: torch.dtype,
        scale: float,
        backend: AttentionKernel,
    ) -> tuple[Tensors, Tensors]:
        """Add a round's gradient of what stays to ``kept``; return it, and the round's gradient of
        what is held.
        """
        queries, columns = (stays, held) if moves == "kv" else (held, stays)
        rows, keys = Rows(*queries), Keys(*columns)
        if block := only_block(tiles, rows.q.shape[1], keys.k.shape[1], backend):
            dq, dk, dv = block_backward(rows, keys, block.kind, scale, backend)
            own: tuple[Tensors, Tensors] = ((dq,), (dk, dv)) if moves == "kv" else ((dk, dv), (dq,))
            kept = tuple(map(Tensor.add_, _dense(kept, wide), own[0])) if kept else own[0]
            return kept, _dense(own[1], None if self._alone else wide)
        kept, moved = _dense(kept, wide) or _zeros(stays, wide), _zeros(held, wide)
        dq, dk, dv = (*kept, *moved) if moves == "kv" else (*moved, *kept)
        add_gradients_((dq, dk, dv), rows, keys, tiles, scale, backend)
        return kept, moved

    def _backend(self, plan: Plan, q: Tensor) -> AttentionKernel:
        if SIMULATED_KERNEL.value is not None:
            return SIMULATED_KERNEL.value
        return select_backend(self.backend_name, q.device.type, q.dtype, plan.documents is not None)

    def _take(self, prefetch: int | None) -> Arrival | None:
        """Return the gather of the handle ``prefetch``, or None without a handle.

        At most one is pending, since only a layer's q projection runs in between. One that is never
        taken wastes memory and traffic, so it is an error.
        """
        found, self._prefetched = self._prefetched, None
        if prefetch != (found and found[0]):
            raise ContextError(
                f"attend: an attention takes the prefetched k and v {prefetch}, and {found and found[0]} is pending; "
                "call what prefetch_kv returns once, before another attention"
            )
        return found and found[1]

    def _circulation(
        self, plan: Plan, moving: Tensors, moves: Moves, prefetched: Arrival | None
    ) -> Whole | Needed:
        if plan.sparse:
            return Needed(self.transport, plan.schedule(self.rank, moves), moving)
        arrival = prefetched or self.transport.gather(moving, self._holders)
        return Whole(self.transport, plan.rounds(self.rank, moves), self._holders, arrival)


@dataclass(eq=False)
class StagedExecutor(Executor):
    """Softmax attention that exchanges heads itself, some at a time (UPipe, arXiv 2602.21196),
    there and back.

    Of U ranks each attends with H / (U * stages) query heads in a stage, so that exchanged tensors
    and the sums of the attention take 1 / stages of the memory. Nothing exchanged is kept: the
    backward exchanges q, k, v, out and lse again. Stages follow each other such that each KV head
    is exchanged once, for all queries that share it.
    """

    heads: HeadExchange
    stages: int

    @property
    def gathers_keys(self) -> bool:
        """Return whether attention starts with an all-gather of k and v: only once a stage's are
        exchanged.
        """
        return False

    def forward(
        self,
        plan: Plan,
        q: Tensor,
        keys: Keys,
        sinks: Tensor | None,
        scale: float,
        prefetch: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, D]`` in q's dtype and lse ``[B, T, H]`` in float32 or wider;
        ``sinks`` ``[H]``.
        """
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
                q_, dout_, out_, lse_ = (
                    heads.to_heads(of(x)) for x in (q, dout, out, lse[..., None])
                )
                own, *parts = super().backward(
                    plan, Rows(q_, dout_, out_, lse_[..., 0]), own_keys, scale
                )
                del q_, dout_, out_, lse_  # before the exchange and the next stage allocate
                sums = (
                    [a.add_(b) for a, b in zip(sums, parts, strict=True)]
                    if sums
                    else [x.to(lse.dtype) for x in parts]
                )
                del parts
                of.put(dq, heads.to_tokens(own.to(q.dtype)))
                del own
            for gradient, total in zip((dk, dv), sums, strict=True):
                keys_of.put(gradient, heads.to_tokens(total.to(gradient.dtype), keys_of.count))
        return dq, dk, dv

    def _stages(self, q: Tensor, k: Tensor) -> Iterator[tuple["_Heads", list["_Heads"]]]:
        """Yield KV heads that are exchanged together, and the query heads of each stage that
        attends to them.
        """
        ranks, heads, kv_heads = len(self.heads.ranks), q.shape[2], k.shape[2]
        own = max(
            1, kv_heads // ranks
        )  # KV heads of a rank; with fewer than ranks, several share one
        turns = gcd(self.stages, own)
        shared = self.stages // turns
        split = (ranks, turns, own // turns, shared, heads // (ranks * own * shared))
        for turn in range(turns):
            keys = _Heads((min(ranks, kv_heads), turns, own // turns, 1, 1), turn, 0)
            yield keys, [_Heads(split, turn, index) for index in range(shared)]


@dataclass(frozen=True)
class _Heads:
    """Some of the heads of all ranks: those at ``turn`` and ``index`` of heads split by rank, turn,
    KV head, index.
    """

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


def _dense(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Return the tensors in this dtype, None: their own, and in order of dimensions, which kernels
    need not keep.
    """
    return tuple(
        x.to(dtype or x.dtype, memory_format=torch.contiguous_format).contiguous() for x in tensors
    )


def _zeros(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Allocate accumulators for (dk, dv), given (k, v), or for dq, given (q, dout, out, lse)."""
    wanted = tensors if len(tensors) == 2 else tensors[:1]
    return tuple(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in wanted)


EXECUTORS: Handles[Executor] = Handles()
_prefetches = count()
