"""Public API of context parallelism: shard tensors and attend over a process group.

Softmax attention is called at once, or started on k and v while the model projects q.
"""

from collections.abc import Callable, Iterable, Sequence
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
from parallel.context.executor import Executor, StagedExecutor
from parallel.context.layout import ContextError, Window
from parallel.context.linear.delta import DeltaExecutor
from parallel.context.linear.delta_attention import DeltaAttention
from parallel.context.linear.halo import Convolution
from parallel.context.linear.state import StateExecutor
from parallel.context.methods import LINEAR_METHODS, METHODS
from parallel.context.plan import PLANS, Plan, PlanHandle, make_plan
from parallel.context.transport import HeadExchange, Transport


class SoftmaxAttention:
    """Attention of this rank's queries to the whole sequence; differentiable, collective.

    Shapes: q ``[B, T_local, H, D]``, k and v ``[B, T_local, K, D]``, H a multiple of K.
    """

    def __init__(
        self, executor: Executor, heads: HeadExchange, plan: Tensor, *, gathers: bool
    ) -> None:
        """Bind an executor to a plan; ``plan`` is a handle in ``PLANS``, ``gathers`` whether it
        joins whole k and v.
        """
        self._executor, self._heads, self._plan, self._gathers = executor, heads, plan, gathers
        self._geometry = executor.geometry

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: PlanHandle | None = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return ``[B, T_local, H, D]`` in q's dtype. Rows of padding are undefined.

        Args:
            mask: the plan of these sequences, from ``ContextParallel.handle``; by default the one
                bound.
            window: keys (left, right) that a query of this layer sees besides its own, -1 for all.
            sinks: a score per head, ``[H]``, in the denominator of the softmax.
            scale: factor of the scores, by default 1 / sqrt(D).

        Raises:
            ContextError: shapes or dtypes do not fit each other or the plan; a window that sees
                nothing or the future.
        """
        self._check_keys(k, v)
        self._check_queries(q, k, sinks)
        return self._to(k, v, self._plan if mask is None else mask.tensor, window, sinks, scale)(q)

    def prefetch_kv(
        self,
        k: Tensor,
        v: Tensor,
        mask: PlanHandle | None = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Start gathering k and v, if the method does; return q -> attention, to be called before
        any other.

        Raises:
            ContextError: as the attention; or k and v were prefetched and never taken.
        """
        if not self._gathers or mask is not None or window is not None:
            return lambda q: self(q, k, v, mask, window=window, sinks=sinks)
        self._check_keys(k, v)
        return self._to(k, v, self._plan, None, sinks, early=True)

    def _to(
        self,
        k: Tensor,
        v: Tensor,
        plan: Tensor,
        window: Any,
        sinks: Any,
        scale: float | None = None,
        early: bool = False,
    ) -> Callable[[Tensor], Tensor]:
        """Return q -> attention to these keys and values, whose gathering starts now if it is
        ``early``.
        """
        keys, values, executor = (
            ops.tokens_to_heads(self._heads, k),
            ops.tokens_to_heads(self._heads, v),
            self._executor,
        )
        prefetch = ops.prefetch_kv(executor, keys, values) if early else None

        def attention(q: Tensor) -> Tensor:
            self._check_queries(q, k, sinks)
            own = None if sinks is None else self._heads.own(sinks)
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            queries = ops.tokens_to_heads(self._heads, q)
            out = ops.context_attention(
                executor, queries, keys, values, own, factor, plan, window, prefetch
            )
            return ops.heads_to_tokens(self._heads, out)

        return attention

    def _check_keys(self, k: Tensor, v: Tensor) -> None:
        self._geometry.method.check_kind("attend", "softmax attention", METHODS)
        if k.shape[1] != self._geometry.local_len or k.shape != v.shape or k.dtype != v.dtype:
            raise ContextError(
                f"attend: k {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype} do not fit a plan of "
                f"{self._geometry.local_len} local positions; pass [B, T_local, heads, D] of one length and dtype"
            )

    def _check_queries(self, q: Tensor, k: Tensor, sinks: Tensor | None) -> None:
        if (
            q.shape[:2] != k.shape[:2]
            or q.shape[2] % k.shape[2]
            or q.shape[3] != k.shape[3]
            or q.dtype != k.dtype
        ):
            raise ContextError(
                f"attend: q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype} do not fit: lengths, head "
                "widths and dtypes must be equal, and query heads a multiple of the key heads"
            )
        self._geometry.check_heads(q.shape[2], k.shape[2])
        if sinks is not None and sinks.shape != q.shape[2:3]:
            given = tuple(sinks.shape)
            raise ContextError(
                f"attend: sinks {given} do not fit {q.shape[2]} query heads; pass one per head"
            )


class ContextParallel:
    """One rank's shard of every sequence, and its attention to the whole sequence."""

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
        self._rank, self._backend = rank, backend
        self._heads = self._outside = HeadExchange(self.transport)
        self._executor = Executor(self.transport, backend)
        if (stages := geometry.options.ulysses_head_chunks) > 1:
            self._executor = StagedExecutor(self.transport, backend, self._heads, stages)
            self._outside = HeadExchange(self.transport, (rank,))  # the executor exchanges
        self._state_executor = StateExecutor(self.transport, backend)
        self._delta_executor = DeltaExecutor(self.transport, backend)
        self._convolution = Convolution(self.transport)
        self._bind_plan(plan)

    def under(
        self, *, documents: tuple[int, ...] | None = None, window: tuple[int, int] | None = None
    ) -> "ContextParallel":
        """Return a copy under another mask, with the same ranks, groups and operators. Not
        collective.

        Use both in any order, as long as all ranks use the same one; a backward uses its forward's
        mask.

        Args:
            documents, window: as for ``make_plan``.

        Raises:
            ContextError: as ``make_plan``.
        """
        other = copy(self)
        other._bind_plan(self.plan.under(documents=documents, window=window))
        return other

    def over(self, seq_len: int, *, documents: tuple[int, ...] | None = None) -> "ContextParallel":
        """Return one of the same method, ranks and groups for sequences of another length. Not
        collective.

        Raises:
            ContextError: as ``make_plan``.
        """
        geometry, mask = self.plan.geometry, self.plan.mask
        of: dict[str, Any] = {"causal": mask.causal, "window": mask.window, "documents": documents}
        plan = make_plan(
            geometry.method.name,
            seq_len=seq_len,
            size=geometry.size,
            **of,
            **asdict(geometry.options),
        )
        return ContextParallel(plan, self.group, self._backend, links=self.transport)

    def plan_ahead(self, windows: Iterable[Window | None] = (None,)) -> None:
        """Make now what an attention under this mask needs, and would make at its first call.

        A forward and a backward, for layers with these windows. Safe in another thread.
        """
        if self.plan.geometry.method.states:
            return
        for window in windows:
            plan = self.plan if window is None else self.plan.windowed(window)
            if plan.sparse:
                plan.schedule(self._rank)
                plan.schedule(self._rank, plan.sparse_moves)

    def _bind_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.positions = plan.positions(self._rank)
        """Ascending global positions of this rank: int64 ``[T_local]``; ``plan.seq_len`` and above
        are padding.
        """
        self._padding = int((self.positions >= plan.seq_len).sum())
        self.handle = PlanHandle(PLANS.tensor(plan))
        """The plan, for a model to hand on to ``attend`` or ``attend_linear`` of any mask of these
        ranks.
        """
        gathers = self._executor.gathers_keys and not plan.sparse
        self.attend = SoftmaxAttention(
            self._executor, self._outside, self.handle.tensor, gathers=gathers
        )
        """Softmax attention: this rank's q, k, v -> out; it can start on k and v before q is ready.
        """
        self.delta = DeltaAttention(self._delta_executor, self._convolution, plan, self.handle)
        self.attend_delta = self.delta.attend
        """The gated delta rule: this rank's q, k, v, g, beta -> out, see ``DeltaAttention``."""
        self.convolve = self.delta.convolve
        """The short causal convolution before it: this rank's x, and weight -> out."""

    def shard(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """Return this rank's shard of ``x`` along ``dim``; pad a length of ``seq_len`` with
        ``pad_value``.

        Raises:
            ContextError: ``x`` has neither the length ``seq_len`` nor ``padded_len`` along ``dim``.
        """
        length, padded = x.shape[dim], self.plan.padded_len
        if length not in (self.plan.seq_len, padded):
            raise ContextError(
                f"shard: dimension {dim} has {length} positions and the plan was made for {self.plan.seq_len}"
            )
        if length < padded:
            after = x.ndim - 1 - dim % x.ndim
            x = F.pad(x, (0, 0) * after + (0, padded - length), value=pad_value)
        return x.index_select(dim, self.positions.to(x.device))

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Gather the full tensor, ``seq_len`` long along ``dim``, from all shards. Collective; no
        gradient.
        """
        if self.plan.size == 1:
            return x.narrow(dim, 0, self.plan.seq_len)
        parts = [torch.empty_like(x) for _ in range(self.plan.size)]
        dist.all_gather(parts, x.detach().contiguous(), group=self.group)
        positions = torch.cat([self.plan.positions(rank) for rank in range(self.plan.size)]).to(
            x.device
        )
        whole = torch.cat(parts, dim)
        return (
            torch.empty_like(whole)
            .index_copy_(dim, positions, whole)
            .narrow(dim, 0, self.plan.seq_len)
        )

    def attend_linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Sequence[float],
        mask: PlanHandle | None = None,
    ) -> Tensor:
        """Compute causal, unscaled linear attention over the whole sequence; differentiable,
        collective.

        A method that splits heads gives this rank the whole sequence and the decays of some heads;
        others pass states on.

        Args:
            q, k: ``[B, T_local, H, D]``.
            v: ``[B, T_local, H, E]``.
            log_decay: log of each head's decay, H numbers <= 0.
            mask: the plan of these sequences, another ``handle``; by default this object's own.

        Returns:
            ``[B, T_local, H, E]`` in v's dtype, 1 in padding: a model may divide by a channel of
            it.

        Raises:
            ContextError: a method for softmax attention only; shapes, heads or dtypes that do not
                fit; a decay outside (0, 1].
        """
        geometry, handle = self.plan.geometry, mask or self.handle
        geometry.method.check_kind("attend_linear", "linear attention", LINEAR_METHODS)
        if q.shape[1] != self.plan.local_len:
            raise ContextError(
                f"attend_linear: q {tuple(q.shape)} does not fit a plan of {self.plan.local_len} local positions; "
                "pass [B, T_local, heads, D]"
            )
        log_decay = tuple(log_decay)
        try:
            check(q, k, v, log_decay)
        except ValueError as error:
            raise ContextError(f"attend_linear: {error}") from error
        q, k, v = map(
            self._without_padding, (q, k, v)
        )  # NaN there would reach tokens by products with 0
        if geometry.method.states:
            return self._without_padding(
                ops.state_attention(self._state_executor, q, k, v, log_decay, handle.tensor)
            )
        geometry.check_heads(q.shape[2], q.shape[2])
        ranks, bounds = geometry.head_group(self._rank), PLANS[handle.tensor].boundaries
        own = len(log_decay) // len(ranks)
        rates = log_decay[ranks.index(self._rank) * own :][:own]
        documents = (0, *bounds, self.plan.padded_len) if bounds else None  # padding is a document
        q, k, v = (ops.tokens_to_heads(self._heads, x) for x in (q, k, v))
        out, _ = linear_attention(q, k, v, rates, documents=documents, backend=self._backend)
        return self._without_padding(ops.heads_to_tokens(self._heads, out))

    def _without_padding(self, x: Tensor) -> Tensor:
        """Return x [B, T_local, H, D] with ones for padding, which is last and has no gradient
        then.
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
        group: the ranks that share a sequence; None is this process alone.
        backend: attention kernel, see ``kernels.attention`` or ``kernels.linear_attention``.
        timeout: for the subgroups of teams and Ulysses within ``group``; by default torch's.
        links: those of the same method and ranks for another length, to take in the place of new
            subgroups.
        others: as for ``make_plan``: ``causal``, ``documents``, ``window`` and the fields of
            ``PlanOptions``.

    Raises:
        ContextError: as in ``make_plan``.
    """
    size = dist.get_world_size(group) if group is not None else 1
    plan = make_plan(method, seq_len=seq_len, size=size, **others)
    return ContextParallel(plan, group, backend, timeout, links)
