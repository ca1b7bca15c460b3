"""Softmax attention over ranks, as a model calls it: at once, or started on k and v while the model projects q."""

from collections.abc import Callable

from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.executor import Executor, attend, prefetch_kv
from parallel.context.heads import HeadExchange
from parallel.context.methods.registry import METHODS, check_kind


class SoftmaxAttention:
    """Attention of this rank's queries to the whole sequence, scaled by 1 / sqrt(D); differentiable, collective.

    Shapes: q ``[B, T_local, H, D]``, k and v ``[B, T_local, K, D]``, H a multiple of K.
    """

    def __init__(self, executor: Executor, heads: HeadExchange, plan: Tensor) -> None:
        """Bind an executor to a plan; ``plan`` is a handle in ``PLANS``."""
        self._executor, self._heads, self._plan = executor, heads, plan
        self._geometry = executor.geometry

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[B, T_local, H, D]`` in q's dtype. Rows of padding are undefined.

        Raises:
            ContextError: shapes or dtypes do not fit each other or the plan.
        """
        self._check_keys(k, v)
        self._check_queries(q, k)
        return self._attend(q, self._heads.to_heads(k), self._heads.to_heads(v), None)

    def prefetch_kv(self, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
        """Start gathering k and v, if the method does; return q -> attention, to be called before any other.

        Raises:
            ContextError: as the attention; or k and v were prefetched and never taken.
        """
        if not self._executor.gathers_keys:
            return lambda q: self(q, k, v)
        self._check_keys(k, v)
        keys, values = self._heads.to_heads(k), self._heads.to_heads(v)
        prefetch = prefetch_kv(self._executor, keys, values)

        def attention(q: Tensor) -> Tensor:
            self._check_queries(q, k)
            return self._attend(q, keys, values, prefetch)

        return attention

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefetch: Tensor | None) -> Tensor:
        """Compute attention; the heads of k and v are already exchanged."""
        q = self._heads.to_heads(q)
        return self._heads.to_tokens(attend(self._executor, q, k, v, q.shape[-1] ** -0.5, self._plan, prefetch))

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
