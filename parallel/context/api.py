"""Public API of context parallelism: shard tensors and attend over a process group."""

from collections.abc import Iterable, Sequence
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from kernels.linear_attention import check, linear_attention
from parallel.context.errors import ContextError
from parallel.context.executor import Executor
from parallel.context.heads import HeadExchange, StagedExecutor
from parallel.context.linear.state import StateExecutor
from parallel.context.mask import Window
from parallel.context.methods.registry import LINEAR_METHODS, check_kind
from parallel.context.plan import PLANS, Plan, PlanHandle, make_plan
from parallel.context.softmax import SoftmaxAttention
from parallel.context.transport import Transport


class ContextParallel:
    """One rank's shard of every sequence, and its attention to the whole sequence."""

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup | None, backend: str = "auto", timeout: timedelta | None = None
    ) -> None:
        rank = dist.get_rank(group) if plan.size > 1 else 0
        geometry = plan.geometry
        self.group = group
        self.transport = Transport(geometry, group, rank, timeout)
        self._rank, self._backend = rank, backend
        self._heads = self._outside = HeadExchange(self.transport)
        self._executor = Executor(geometry, self.transport, rank, backend)
        if (stages := geometry.options.ulysses_head_chunks) > 1:
            self._executor = StagedExecutor(geometry, self.transport, rank, backend, self._heads, stages)
            self._outside = HeadExchange(self.transport, (rank,))  # the executor exchanges
        self._state_executor = StateExecutor(geometry, self.transport, rank, backend)
        self._bind_plan(plan)

    def under(
        self, *, documents: tuple[int, ...] | None = None, window: tuple[int, int] | None = None
    ) -> "ContextParallel":
        """Return a copy under another mask, with the same ranks, groups and operators. Not collective.

        Use both in any order, as long as all ranks use the same one; a backward uses its forward's mask.

        Args:
            documents, window: as for ``make_plan``.

        Raises:
            ContextError: as ``make_plan``.
        """
        other = copy(self)
        other._bind_plan(self.plan.under(documents=documents, window=window))
        return other

    def plan_ahead(self, windows: Iterable[Window | None] = (None,)) -> None:
        """Make now what an attention under this mask needs, and would make at its first call.

        A forward and a backward, for layers with these windows. Safe in another thread.
        """
        if self.plan.geometry.method.capabilities().states:
            return
        for window in windows:
            plan = self.plan if window is None else self.plan.windowed(window)
            if plan.sparse:
                plan.schedule(self._rank)
                plan.schedule(self._rank, plan.sparse_moves)

    def _bind_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.positions = plan.positions(self._rank)
        """Ascending global positions of this rank: int64 ``[T_local]``; ``plan.seq_len`` and above are padding."""
        self.handle = PlanHandle(PLANS.tensor(plan))
        """The plan, for a model to hand on to ``attend`` or ``attend_linear`` of any mask of these ranks."""
        gathers = self._executor.gathers_keys and not plan.sparse
        self.attend = SoftmaxAttention(self._executor, self._outside, self.handle.tensor, gathers=gathers)
        """Softmax attention: this rank's q, k, v -> out; it can start on k and v before q is ready."""

    def shard(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """Return this rank's shard of ``x`` along ``dim``; pad a length of ``seq_len`` with ``pad_value``.

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
        """Gather the full tensor, ``seq_len`` long along ``dim``, from all shards. Collective; no gradient."""
        if self.plan.size == 1:
            return x.narrow(dim, 0, self.plan.seq_len)
        parts = [torch.empty_like(x) for _ in range(self.plan.size)]
        dist.all_gather(parts, x.detach().contiguous(), group=self.group)
        positions = torch.cat([self.plan.positions(rank) for rank in range(self.plan.size)]).to(x.device)
        whole = torch.cat(parts, dim)
        return torch.empty_like(whole).index_copy_(dim, positions, whole).narrow(dim, 0, self.plan.seq_len)

    def attend_linear(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], mask: PlanHandle | None = None
    ) -> Tensor:
        """Compute causal, unscaled linear attention over the whole sequence; differentiable, collective.

        A method that splits heads gives this rank the whole sequence and the decays of some heads; others pass
        states on.

        Args:
            q, k: ``[B, T_local, H, D]``.
            v: ``[B, T_local, H, E]``.
            log_decay: log of each head's decay, H numbers <= 0.
            mask: the plan of these sequences, another ``handle``; by default this object's own.

        Returns:
            ``[B, T_local, H, E]`` in v's dtype. Rows of padding are undefined.

        Raises:
            ContextError: a method for softmax attention only; shapes, heads or dtypes that do not fit; a decay outside
                (0, 1].
        """
        geometry, handle = self.plan.geometry, mask or self.handle
        check_kind(geometry.method, "attend_linear", "linear attention", LINEAR_METHODS)
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
        if geometry.method.capabilities().states:
            operands = q, k, v, log_decay, self._state_executor.handle, handle.tensor
            return torch.ops.longmesh.state_attention(*operands)[0]
        geometry.check_heads(q.shape[2], q.shape[2])
        ranks, bounds = geometry.head_group(self._rank), PLANS[handle.tensor].boundaries
        own = len(log_decay) // len(ranks)
        rates = log_decay[ranks.index(self._rank) * own :][:own]
        documents = (0, *bounds, self.plan.padded_len) if bounds else None  # padding is a document
        q, k, v = (self._heads.to_heads(x) for x in (q, k, v))
        return self._heads.to_tokens(linear_attention(q, k, v, rates, documents=documents, backend=self._backend)[0])


def context_parallel(
    method: str,
    *,
    seq_len: int,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    timeout: timedelta | None = None,
    **others: Any,
) -> ContextParallel:
    """Set up context parallelism for sequences of ``seq_len`` tokens over ``group``. Collective.

    Args:
        group: the ranks that share a sequence; None is this process alone.
        backend: attention kernel, see ``kernels.attention`` or ``kernels.linear_attention``.
        timeout: for the subgroups of teams and Ulysses within ``group``; by default torch's.
        others: as for ``make_plan``: ``causal``, ``documents``, ``window`` and the fields of ``PlanOptions``.

    Raises:
        ContextError: as in ``make_plan``.
    """
    size = dist.get_world_size(group) if group is not None else 1
    return ContextParallel(make_plan(method, seq_len=seq_len, size=size, **others), group, backend, timeout)
