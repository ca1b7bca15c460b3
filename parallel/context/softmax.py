"""Softmax attention over ranks, as a model calls it: at once, or started on k and v while the model projects q."""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.executor import Executor
from parallel.context.heads import HeadExchange
from parallel.context.mask import Window
from parallel.context.methods.registry import METHODS, check_kind
from parallel.context.plan import PlanHandle


class SoftmaxAttention:
    """Attention of this rank's queries to the whole sequence, scaled by 1 / sqrt(D); differentiable, collective.

    Shapes: q ``[B, T_local, H, D]``, k and v ``[B, T_local, K, D]``, H a multiple of K.
    """

    def __init__(self, executor: Executor, heads: HeadExchange, plan: Tensor, *, gathers: bool) -> None:
        """Bind an executor to a plan; ``plan`` is a handle in ``PLANS``, ``gathers`` whether it joins whole k and v."""
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
    ) -> Tensor:
        """Return ``[B, T_local, H, D]`` in q's dtype. Rows of padding are undefined.

        Args:
            mask: the plan of these sequences, from ``ContextParallel.handle``; by default the one bound.
            window: keys (left, right) that a query of this layer sees besides its own, -1 for all.
            sinks: a score per head, ``[H]``, in the denominator of the softmax.

        Raises:
            ContextError: shapes or dtypes do not fit each other or the plan; a window that sees nothing or the future.
        """
        self._check_keys(k, v)
        self._check_queries(q, k)
        _check_sinks(sinks, q)
        keys, values = self._heads.to_heads(k), self._heads.to_heads(v)
        return self._attend(q, keys, values, None, self._plan if mask is None else mask.tensor, window, sinks)

    def prefetch_kv(
        self,
        k: Tensor,
        v: Tensor,
        mask: PlanHandle | None = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Start gathering k and v, if the method does; return q -> attention, to be called before any other.

        Raises:
            ContextError: as the attention; or k and v were prefetched and never taken.
        """
        if not self._gathers or mask is not None or window is not None:
            return lambda q: self(q, k, v, mask, window=window, sinks=sinks)
        self._check_keys(k, v)
        keys, values = self._heads.to_heads(k), self._heads.to_heads(v)
        prefetch = torch.ops.longmesh.prefetch_kv(keys.detach(), values.detach(), self._executor.handle)

        def attention(q: Tensor) -> Tensor:
            self._check_queries(q, k)
            _check_sinks(sinks, q)
            return self._attend(q, keys, values, prefetch, self._plan, None, sinks)

        return attention

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefetch: Tensor | None,
        plan: Tensor,
        window: Window | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute attention; the heads of k and v are already exchanged."""
        q, sinks = self._heads.to_heads(q), None if sinks is None else self._heads.own(sinks)
        scale, handle = q.shape[-1] ** -0.5, self._executor.handle
        out, _ = torch.ops.longmesh.context_attention(q, k, v, sinks, scale, handle, plan, list(window or ()), prefetch)
        return self._heads.to_tokens(out)

    def _check_keys(self, k: Tensor, v: Tensor) -> None:
        check_kind(self._geometry.method, "attend", "softmax attention", METHODS)
        if k.shape[1] != self._geometry.local_len or k.shape != v.shape or k.dtype != v.dtype:
            raise ContextError(
                f"attend: k {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype} do not fit a plan of "
                f"{self._geometry.local_len} local positions; pass [B, T_local, heads, D] of one length and dtype"
            )

    def _check_queries(self, q: Tensor, k: Tensor) -> None:
        if q.shape[:2] != k.shape[:2] or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3] or q.dtype != k.dtype:
            raise ContextError(
                f"attend: q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype} do not fit: lengths, head "
                "widths and dtypes must be equal, and query heads a multiple of the key heads"
            )
        self._geometry.check_heads(q.shape[2], k.shape[2])


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ContextError(f"attend: sinks {tuple(sinks.shape)} do not fit {q.shape[2]} query heads; pass one per head")
