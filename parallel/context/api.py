"""Public API of context parallelism: shard tensors and attend over a process group."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from kernels.linear_attention import check
from kernels.ops import linear_attention
from parallel.context import ops
from parallel.context.executor import Executor
from parallel.context.layout import ContextError, Window
from parallel.context.linear.delta import DeltaExecutor
from parallel.context.linear.delta_attention import DeltaAttention
from parallel.context.linear.halo import Convolution
from parallel.context.linear.state import StateExecutor
from parallel.context.methods import LINEAR_METHODS
from parallel.context.plan import PLANS, Plan, PlanHandle, make_plan
from parallel.context.slices.delta import SliceDelta
from parallel.context.slices.layer import slice_bounds
from parallel.context.softmax import SoftmaxAttention
from parallel.context.staged import StagedExecutor
from parallel.context.transport import HeadExchange, Transport


class ContextParallel:
    """One rank's shard of every sequence, and its attention to the whole sequence.

    Process groups, executors and operators belong to the geometry: ranks, layout and length. A mask
    does not change them, so ``under`` returns a shallow copy with another plan: it costs nothing
    per micro-batch, and a compiled layer keeps its executor handles and does not recompile.
    """

    positions: Tensor
    """Global positions of this rank's tokens: int64 ``[T_local]``; positions from ``plan.seq_len``
    on are padding. They ascend, except in slices under tensor parallelism.
    """
    handle: PlanHandle
    """Handle of the plan. A model passes it to ``attend`` or ``attend_linear``, which accept
    the plan of any mask for the same geometry.
    """
    attend: SoftmaxAttention
    """Softmax attention of this rank's q, k and v; it can start on k and v before q is ready."""
    delta: DeltaAttention
    """Gated delta rule of this rank's q, k, v, g and beta, and the convolution before it."""

    def __init__(
        self,
        plan: Plan,
        group: dist.ProcessGroup | None,
        backend: str = "auto",
        timeout: timedelta | None = None,
        links: Transport | None = None,
    ) -> None:
        rank = dist.get_rank(group) if plan.size > 1 else 0
        geometry = plan.geometry
        self.group = group
        self.transport = Transport(geometry, group, rank, timeout, links)
        self._rank = rank
        self._backend = backend

        self._heads = HeadExchange(self.transport)
        self._outside = self._heads
        self._executor = Executor(self.transport, backend)
        stages = geometry.options.ulysses_head_chunks
        if stages > 1:
            self._executor = StagedExecutor(self.transport, backend, self._heads, stages)
            # Nothing is left to exchange outside, since this executor exchanges heads itself.
            self._outside = HeadExchange(self.transport, (rank,))

        self._state_executor = StateExecutor(self.transport, backend)
        self._delta_executor = DeltaExecutor(self.transport, backend)
        self._convolution = Convolution(self.transport)
        self._bind_plan(plan)

    def under(
        self, *, documents: tuple[int, ...] | None = None, window: tuple[int, int] | None = None
    ) -> "ContextParallel":
        """Return a copy under another mask, with the same ranks, groups and operators.

        Not collective. Both objects may be used in any order, as long as all ranks use the same
        one; a backward pass uses the mask of its forward pass.

        Args:
            documents, window: as for ``make_plan``.

        Raises:
            ContextError: for the same reasons as ``make_plan``.
        """
        other = copy(self)
        other._bind_plan(self.plan.under(cu_seqlens=documents, window=window))
        return other

    def over(self, seq_len: int, *, documents: tuple[int, ...] | None = None) -> "ContextParallel":
        """Return an object for another sequence length, with the same method, ranks and groups.

        Not collective.

        Raises:
            ContextError: for the same reasons as ``make_plan``.
        """
        geometry = self.plan.geometry
        mask = self.plan.mask
        options: dict[str, Any] = {
            "causal": mask.causal,
            "window": mask.window,
            "documents": documents,
            **asdict(geometry.options),
        }
        plan = make_plan(geometry.method.name, seq_len=seq_len, size=geometry.size, **options)
        return ContextParallel(plan, self.group, self._backend, links=self.transport)

    def plan_ahead(self, windows: Iterable[Window | None] = (None,)) -> None:
        """Precompute the schedules that attention under this mask needs at its first call.

        They cover the forward and backward passes of layers with these windows. The call is safe in
        another thread, so a data loader's thread can prepare the next micro-batch.
        """
        if self.plan.geometry.method.states:
            return
        geometry = self.plan.geometry
        for window in windows:
            plan = self.plan if window is None else self.plan.windowed(window)
            if geometry.options.slice_len:
                for first, end in slice_bounds(geometry.local_len, geometry.options.slice_len):
                    bounds = (first * geometry.size, end * geometry.size)
                    plan.slice_tiles(self._rank, *bounds)
                    columns = geometry.options.slice_len * geometry.ulysses_degree
                    plan.slice_tiles(self._rank, *bounds, columns)
            elif plan.sparse:
                plan.schedule(self._rank)
                plan.schedule(self._rank, plan.sparse_moves)

    def _bind_plan(self, plan: Plan) -> None:
        """Use a plan for this object's attention functions."""
        self.plan = plan
        self.positions = plan.positions(self._rank)
        self._padding = int((self.positions >= plan.seq_len).sum())
        self.handle = PlanHandle(PLANS.tensor(plan))

        gathers = self._executor.gathers_keys and not plan.sparse
        self.attend = SoftmaxAttention(
            self._executor, self._outside, self.handle.tensor, gathers=gathers
        )
        self.delta = DeltaAttention(self._delta_executor, self._convolution, plan, self.handle)
        self.attend_delta = self.delta.attend
        """Gated delta rule of this rank's q, k, v, g and beta, see ``DeltaAttention``."""
        self.convolve = self.delta.convolve
        """Short causal convolution of this rank's x with a weight; delta rule layers run it first.
        """

    def delta_of_slices(self, whole: Any, backend: str = "auto") -> SliceDelta:
        """Return the gated delta rule of slices of this object's sequences; see ``SliceDelta``."""
        everyone = HeadExchange(self.transport, tuple(range(self.plan.size)))
        return SliceDelta(whole, everyone, self.handle, backend)

    def shard(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """Return this rank's shard of ``x`` along ``dim``, padded with ``pad_value`` where needed.

        Raises:
            ContextError: ``x`` has neither the length ``seq_len`` nor ``padded_len`` along ``dim``.
        """
        length = x.shape[dim]
        padded = self.plan.padded_len
        if length not in (self.plan.seq_len, padded):
            raise ContextError(
                f"shard: dimension {dim} has {length} positions, but the plan was made for "
                f"{self.plan.seq_len}; pass the whole sequence, with or without padding"
            )
        if length < padded:
            later_dims = x.ndim - 1 - dim % x.ndim  # F.pad counts dimensions from the last
            x = F.pad(x, (0, 0) * later_dims + (0, padded - length), value=pad_value)
        return x.index_select(dim, self.positions.to(x.device))

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Gather the full tensor from all shards, ``seq_len`` long along ``dim``.

        Collective; no gradient.
        """
        shards = [x.detach()]
        if self.plan.size > 1:
            shards = [torch.empty_like(x) for _ in range(self.plan.size)]
            dist.all_gather(shards, x.detach().contiguous(), group=self.group)
        elif not self.plan.geometry.layout.needs_slices:
            return x.narrow(dim, 0, self.plan.seq_len)
        positions = torch.cat([self.plan.positions(rank) for rank in range(self.plan.size)])
        joined = torch.cat(shards, dim)
        ordered = torch.empty_like(joined).index_copy_(dim, positions.to(x.device), joined)
        return ordered.narrow(dim, 0, self.plan.seq_len)

    def attend_linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Sequence[float],
        mask: PlanHandle | None = None,
    ) -> Tensor:
        """Compute causal, unscaled linear attention over the whole sequence.

        Differentiable, collective. A method that splits heads gives this rank some heads of the
        whole sequence, with their decays; other methods pass states on.

        Args:
            q, k: ``[B, T_local, H, D]``.
            v: ``[B, T_local, H, E]``.
            log_decay: log of each head's decay, H numbers <= 0.
            mask: handle of the plan for these sequences; by default this object's own.

        Returns:
            ``[B, T_local, H, E]`` in v's dtype. Padding is 1, since a model may divide by one of
            the channels.

        Raises:
            ContextError: the method is for softmax attention only; shapes, heads or dtypes do not
                fit; or a decay is outside (0, 1].
        """
        geometry = self.plan.geometry
        if geometry.options.slice_len:
            raise ContextError(
                "attend_linear: the plan's tokens lie in slices, but linear attention takes whole "
                "sequences; make the plan without slice_len"
            )
        handle = mask or self.handle
        geometry.method.check_kind("attend_linear", "linear attention", LINEAR_METHODS)
        if q.shape[1] != self.plan.local_len:
            raise ContextError(
                f"attend_linear: q {tuple(q.shape)} does not fit a plan of {self.plan.local_len} "
                "local positions; pass [B, T_local, heads, D]"
            )
        log_decay = tuple(log_decay)
        try:
            check(q, k, v, log_decay)
        except ValueError as error:
            raise ContextError(f"attend_linear: {error}") from error

        # A NaN in padding would reach real tokens, since the scan multiplies it by 0.
        q, k, v = map(self._without_padding, (q, k, v))
        if geometry.method.states:
            out = ops.state_attention(self._state_executor, q, k, v, log_decay, handle.tensor)
            return self._without_padding(out)

        geometry.check_heads(q.shape[2], q.shape[2])
        ranks = geometry.head_group(self._rank)
        local_heads = len(log_decay) // len(ranks)
        first_head = ranks.index(self._rank) * local_heads
        decays = log_decay[first_head : first_head + local_heads]
        boundaries = PLANS[handle.tensor].boundaries
        cu_seqlens = None
        if boundaries:
            cu_seqlens = (0, *boundaries, self.plan.padded_len)  # padding counts as a document

        q, k, v = (ops.tokens_to_heads(self._heads, x) for x in (q, k, v))  # [B, U * T, H / U, D]
        out, _ = linear_attention(q, k, v, decays, cu_seqlens=cu_seqlens, backend=self._backend)
        return self._without_padding(ops.heads_to_tokens(self._heads, out))

    def _without_padding(self, x: Tensor) -> Tensor:
        """Return x ``[B, T_local, H, D]`` with ones in padding, which then has no gradient.

        Padding lies at the end of a rank's tokens, since positions ascend without slices.
        """
        if not self._padding:
            return x
        return F.pad(x[:, : x.shape[1] - self._padding], (0, 0, 0, 0, 0, self._padding), value=1.0)


def context_parallel(
    method: str,
    *,
    seq_len: int,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    timeout: timedelta | None = None,
    links: Transport | None = None,
    **others: Any,
) -> ContextParallel:
    """Set up context parallelism for sequences of ``seq_len`` tokens over ``group``. Collective.

    Args:
        group: the ranks that share a sequence; None means this process alone.
        backend: attention kernel, see ``kernels.attention`` or ``kernels.linear_attention``.
        timeout: timeout of the subgroups for teams and Ulysses; by default torch's.
        links: a transport for the same method and ranks but another length; its subgroups are
            reused.
        others: as for ``make_plan``: ``causal``, ``documents``, ``window`` and the fields of
            ``PlanOptions``.

    Raises:
        ContextError: for the same reasons as ``make_plan``.
    """
    size = dist.get_world_size(group) if group is not None else 1
    plan = make_plan(method, seq_len=seq_len, size=size, **others)
    return ContextParallel(plan, group, backend, timeout, links)
