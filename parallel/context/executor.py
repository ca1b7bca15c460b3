"""Executor: run a plan's rounds over a process group, forward and backward.

Partial outputs, lse and all gradients accumulate in float32 (float64 for float64 inputs, and for
lse on the CPU) and are cast once at the end, so the error against a float64 reference does not grow
with the number of ranks. Every transfer is posted before the compute that hides it.

Shapes: B batch, T local positions, H query heads, K key/value heads, D head width. q ``[B, T, H,
D]``, k and v ``[B, T, K, D]``. With Ulysses, T, H and K are those after the exchange of heads.
"""

from dataclasses import dataclass
from itertools import count

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
from parallel.context.circulation import NeededRows, WholeTensors
from parallel.context.layout import ContextError
from parallel.context.plan import Plan
from parallel.context.traffic import Moves, Sizes
from parallel.context.transport import Arrival, Tensors, Transport
from runtime.tensors import Handles


@dataclass(eq=False)
class Executor:
    """Softmax attention of one rank, for any plan of one geometry.

    One loop serves every method. Some tensors are *stationary*: those of this rank, or of its team,
    gathered once. Others *visit*: in each round the rank holds those of another rank. In a forward
    pass queries are stationary and KV visits. In a backward pass either KV visits, followed by its
    gradient, or queries (q, dout, out, lse) visit, followed by dq. The backward pass needs no
    second softmax, because with the global out and lse of a row, the gradient of each tile is
    independent of all others.
    """

    transport: Transport
    backend_name: str

    def __post_init__(self) -> None:
        self.handle = EXECUTORS.add(self)
        self.geometry = self.transport.geometry
        self.rank = self.transport.rank
        self._holders = self.geometry.holders(self.rank)
        self._team = self.geometry.teammates(self.rank)
        # If all ranks split the heads, no other rank attends with this rank's heads.
        self._alone = self.geometry.size == self.geometry.ulysses_degree
        self._prefetched: tuple[int, Arrival] | None = None

    @property
    def gathers_keys(self) -> bool:
        """True if attention starts with an all-gather of k and v."""
        return len(self._holders) > 1

    @property
    def has_team(self) -> bool:
        """True if this rank attends for the queries of other ranks too."""
        return len(self._team) > 1

    def prefetch_kv(self, k: Tensor, v: Tensor) -> int:
        """Start gathering k and v; return the handle to pass to the next ``forward``."""
        self._take_prefetched(None)
        handle = next(_prefetches)
        self._prefetched = handle, self.transport.gather((k, v), self._holders)
        return handle

    def forward(
        self,
        plan: Plan,
        q: Tensor,
        keys: Keys,
        sinks: Tensor | None,
        scale: float,
        prefetch: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, D]`` in q's dtype and lse ``[B, T, H]`` in float32 or wider.

        ``sinks`` is ``[H]``.
        """
        accum_dtype = torch.promote_types(q.dtype, torch.float32)
        backend = self.kernel(plan, q)
        team_tokens = q.shape[1] * len(self._team)
        rows = (q.shape[0], team_tokens, q.shape[2])  # [B, team's T, H]

        circulation = self._circulation(plan, keys, "kv", self._take_prefetched(prefetch))
        gather_queries = self.gather_team((q,))
        team_q: Tensors = ()
        results: Tensors = ()

        for _, tiles, (k, v) in circulation.visits():
            team_q = team_q or gather_queries()
            (queries,) = team_q

            # If the first round has a single tile, its results come from one kernel call, and
            # there is nothing to merge them with.
            tile = None if results else only_block(tiles, team_tokens, None, backend)
            if tile:
                results = block_forward(
                    queries, k[:, tile.k], v[:, tile.k], tile.kind, scale, backend
                )
            else:
                # An error in lse scales all weights of a row, so it does not average out in the
                # gradients of the norms of q and k. Each merge would round lse once more; therefore
                # it is kept in float64 on a CPU. GPU kernels return lse in float32.
                out, lse = results or empty_results(rows, q, accum_dtype)
                lse_dtype = torch.float64 if lse.device.type == "cpu" else accum_dtype
                (out,) = _dense((out,), accum_dtype)
                (lse,) = _dense((lse,), lse_dtype)
                results = out, lse
                attend_tiles_(out, lse, queries, Keys(k, v), tiles, scale, backend)

            del k, v  # free them before the next round allocates
        if not team_q:
            gather_queries()  # all tokens here are padding, but the transfer must end

        # Without a team and without sinks nothing is left to merge, so the kernel's dtype is final.
        is_final = not self.has_team and sinks is None
        if results:
            out, lse = _dense(results, None if is_final else accum_dtype)
        else:
            out, lse = empty_results(rows, q, accum_dtype)
        lse = lse.to(accum_dtype)

        out, lse = self.combine(out, lse, sinks)
        return out.to(q.dtype), lse

    def gather_team(self, tensors: Tensors) -> Arrival:
        """Start gathering tensors ``[B, T, ...]`` of the ranks that this rank attends for."""
        return self.transport.gather(tensors, self._team)

    def combine(self, out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Combine the team's partial results into those of this rank's queries, with sinks.

        Args:
            out: ``[B, team's T, H, D]``, in float32 or wider if there is a team or sinks.
            lse: ``[B, team's T, H]``, in float32 or wider.
            sinks: ``[H]``.
        """
        if self.has_team:
            out, lse = merged(
                self.transport.scatter(out, self._team), self.transport.scatter(lse, self._team)
            )
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return out, lse

    def backward(self, plan: Plan, rows: Rows, keys: Keys, scale: float) -> Tensors:
        """Return dq, dk and dv in float32 or wider or, from one tile, in the kernel's dtypes.

        The plan chooses whether KV or queries circulate; their gradient follows one round behind or
        later. The other operands and their gradient are stationary.
        """
        backend = self.kernel(plan, rows.q)
        accum_dtype = rows.lse.dtype
        batch, tokens, heads, head_dim = rows.q.shape
        dims = Sizes(batch, tokens, heads, keys.k.shape[2], head_dim, rows.q.element_size())
        moves = plan.backward_moves(dims)

        moving: Tensors = keys
        local: Tensors = rows
        if moves == "queries":
            moving = rows
            local = keys

        circulation = self._circulation(plan, moving, moves, None)
        gather_stationary = self.gather_team(local)
        stationary: Tensors = ()
        local_gradient: Tensors = ()

        for index, tiles, visiting in circulation.visits():
            stationary = stationary or gather_stationary()
            local_gradient, visiting_gradient = self._round_backward(
                tiles, stationary, visiting, local_gradient, moves, accum_dtype, scale, backend
            )
            circulation.send_gradient(index, visiting_gradient)
            del visiting, visiting_gradient  # free them before the next round allocates

        returned = circulation.own_gradient() or _zeros(moving, accum_dtype)
        if not local_gradient:  # all tokens here are padding, which no query sees
            local_gradient = _zeros(gather_stationary(), accum_dtype)
        if self.has_team:
            local_gradient = tuple(map(self.reduce_team, _dense(local_gradient, accum_dtype)))
        return (*local_gradient, *returned) if moves == "kv" else (*returned, *local_gradient)

    def reduce_team(self, gradient: Tensor) -> Tensor:
        """Sum the team's parts for this rank's tokens: [B, team's T, ...] -> [B, T, ...]."""
        return self.transport.reduced(gradient, self._team)

    def _round_backward(
        self,
        tiles: tuple[Tile, ...],
        stationary: Tensors,
        visiting: Tensors,
        local_gradient: Tensors,
        moves: Moves,
        accum_dtype: torch.dtype,
        scale: float,
        backend: AttentionKernel,
    ) -> tuple[Tensors, Tensors]:
        """Compute the gradients of one round.

        If the round has a single tile, the kernel's results are its gradients, without any sum.

        Args:
            tiles: the round's tiles.
            stationary, visiting: (k, v) or (q, dout, out, lse), depending on ``moves``.
            local_gradient: gradient of the stationary tensors so far, () in the first round.
            moves: the operands that visit.
            accum_dtype: dtype of sums.

        Returns:
            ``local_gradient`` with the round's gradient of the stationary tensors added, and the
            round's gradient of the visiting ones.
        """
        if moves == "kv":
            rows = Rows(*stationary)
            keys = Keys(*visiting)
        else:
            rows = Rows(*visiting)
            keys = Keys(*stationary)

        block = only_block(tiles, rows.q.shape[1], keys.k.shape[1], backend)
        if block:
            dq, dk, dv = block_backward(rows, keys, block.kind, scale, backend)
            added: Tensors = (dq,) if moves == "kv" else (dk, dv)
            visiting_gradient: Tensors = (dk, dv) if moves == "kv" else (dq,)

            if local_gradient:
                local_gradient = _dense(local_gradient, accum_dtype)
                local_gradient = tuple(map(Tensor.add_, local_gradient, added))
            else:
                local_gradient = added
            return local_gradient, _dense(visiting_gradient, None if self._alone else accum_dtype)

        local_gradient = _dense(local_gradient, accum_dtype) or _zeros(stationary, accum_dtype)
        visiting_gradient = _zeros(visiting, accum_dtype)
        if moves == "kv":
            (dq,) = local_gradient
            dk, dv = visiting_gradient
        else:
            (dq,) = visiting_gradient
            dk, dv = local_gradient

        add_gradients_((dq, dk, dv), rows, keys, tiles, scale, backend)
        return local_gradient, visiting_gradient

    def kernel(self, plan: Plan, q: Tensor) -> AttentionKernel:
        """Return the kernel for a plan; ``auto`` chooses another kernel for packed documents."""
        if SIMULATED_KERNEL.value is not None:
            return SIMULATED_KERNEL.value
        return select_backend(
            self.backend_name, q.device.type, q.dtype, plan.cu_seqlens is not None
        )

    def _take_prefetched(self, handle: int | None) -> Arrival | None:
        """Take the pending gather of k and v, which must have this handle; None means no gather.

        At most one gather is pending, since only the layer's q projection runs between its start
        and its use. A gather that is never used is an error, because it wastes memory and traffic.
        """
        pending_handle = None
        arrival = None
        if self._prefetched is not None:
            pending_handle, arrival = self._prefetched
            self._prefetched = None
        if handle != pending_handle:
            raise ContextError(
                f"attend: this attention takes prefetch {handle} of k and v, but prefetch "
                f"{pending_handle} is pending; call the function that prefetch_kv returns exactly "
                "once, before any other attention"
            )
        return arrival

    def _circulation(
        self, plan: Plan, moving: Tensors, moves: Moves, prefetched: Arrival | None
    ) -> WholeTensors | NeededRows:
        """Start to circulate KV or queries, as whole tensors or, under sparse plans, as rows."""
        if plan.sparse:
            return NeededRows(self.transport, plan.schedule(self.rank, moves), moving)
        arrival = prefetched or self.transport.gather(moving, self._holders)
        return WholeTensors(self.transport, plan.rounds(self.rank, moves), self._holders, arrival)


def _dense(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Return the tensors as contiguous ones of the given dtype; None keeps each tensor's dtype.

    Collectives need contiguous tensors, but kernels may return transposed ones.
    """
    return tuple(
        x.to(dtype or x.dtype, memory_format=torch.contiguous_format).contiguous() for x in tensors
    )


def _zeros(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Allocate accumulators for (dk, dv), given (k, v), or for dq, given (q, dout, out, lse)."""
    with_gradient = tensors if len(tensors) == 2 else tensors[:1]
    return tuple(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in with_gradient)


EXECUTORS: Handles[Executor] = Handles()
_prefetches = count()
