"""Softmax attention of one rank: checks arguments, and exchanges heads before and after.

A model calls it with q, k and v together, or starts it on k and v while it still projects q.
"""

from collections.abc import Callable

from torch import Tensor

from parallel.context import ops
from parallel.context.executor import Executor
from parallel.context.layout import ContextError, Window
from parallel.context.methods import METHODS
from parallel.context.plan import PlanHandle
from parallel.context.slices.attention import AttendHeads, attend_slice
from parallel.context.slices.layer import Slice
from parallel.context.transport import HeadExchange


class SoftmaxAttention:
    """Attention of this rank's queries to the whole sequence; differentiable, collective.

    Shapes: q ``[B, T_local, H, D]``, k and v ``[B, T_local, K, D]``, H a multiple of K.
    """

    def __init__(
        self, executor: Executor, heads: HeadExchange, plan: Tensor, *, gathers: bool
    ) -> None:
        """Bind an executor to a plan.

        Args:
            plan: a handle in ``PLANS``.
            gathers: True if the attention starts with an all-gather of whole k and v;
                ``prefetch_kv`` can then start it early.
        """
        self._executor = executor
        self._heads = heads
        self._plan = plan
        self._gathers = gathers
        self._geometry = executor.geometry

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: PlanHandle | Slice | None = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Return the attention ``[B, T_local, H, D]`` in q's dtype; rows of padding are undefined.

        Args:
            mask: the plan of these sequences, from ``ContextParallel.handle``; by default the bound
                plan. Or a slice, whose tokens attend to those of their own and earlier slices.
            window: numbers of keys (left, right) that a query of this layer sees besides its own;
                -1 for all.
            sinks: a score per head, ``[H]``, in the denominator of the softmax.
            scale: factor of the scores, by default 1 / sqrt(D).

        Raises:
            ContextError: shapes or dtypes do not fit each other or the plan; or the window is
                not valid, see ``mask_of``.
        """
        if isinstance(mask, Slice):
            return self._bind_slice(k, v, mask, window, sinks, scale)(q)
        self._check_keys(k, v)
        self._check_queries(q, k, sinks)
        plan = self._plan if mask is None else mask.tensor
        return self._bind_keys(k, v, plan, window, sinks, scale)(q)

    def prefetch_kv(
        self,
        k: Tensor,
        v: Tensor,
        mask: PlanHandle | Slice | None = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Start gathering k and v, if the method does, and return the function q -> attention.

        Call that function before any other attention of this object.

        Raises:
            ContextError: for the same reasons as the attention, or because an earlier prefetch of k
                and v was never used.
        """
        if isinstance(mask, Slice):
            return self._bind_slice(k, v, mask, window, sinks)
        if not self._gathers or mask is not None or window is not None:
            return lambda q: self(q, k, v, mask, window=window, sinks=sinks)
        self._check_keys(k, v)
        return self._bind_keys(k, v, self._plan, None, sinks, early=True)

    def _bind_slice(
        self,
        k: Tensor,
        v: Tensor,
        piece: Slice,
        window: Window | None,
        sinks: Tensor | None,
        scale: float | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Return the function q -> attention of a slice to its own and earlier slices."""
        self._check_keys(k, v, piece.end - piece.first)
        plan = self._plan if piece.mask is None else piece.mask.tensor
        attend = attend_slice(self._executor, self._heads, piece, k, v, plan, window)
        return self._over_heads(k, sinks, scale, attend)

    def _bind_keys(
        self,
        k: Tensor,
        v: Tensor,
        plan: Tensor,
        window: Window | None,
        sinks: Tensor | None,
        scale: float | None = None,
        early: bool = False,
    ) -> Callable[[Tensor], Tensor]:
        """Return the function q -> attention; if ``early``, start gathering k and v now."""
        executor = self._executor
        keys = ops.tokens_to_heads(self._heads, k)
        values = ops.tokens_to_heads(self._heads, v)
        prefetch = ops.prefetch_kv(executor, keys, values) if early else None

        def attend(queries: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
            return ops.context_attention(
                executor, queries, keys, values, sinks, scale, plan, window, prefetch
            )

        return self._over_heads(k, sinks, scale, attend)

    def _over_heads(
        self, k: Tensor, sinks: Tensor | None, scale: float | None, attend: AttendHeads
    ) -> Callable[[Tensor], Tensor]:
        """Return the function q -> attention that splits the heads of q for ``attend``."""

        def attention(q: Tensor) -> Tensor:
            self._check_queries(q, k, sinks)
            local_sinks = None if sinks is None else self._heads.local_heads(sinks)
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            queries = ops.tokens_to_heads(self._heads, q)  # [B, U T_local, H / U, D]
            return ops.heads_to_tokens(self._heads, attend(queries, local_sinks, factor))

        return attention

    def _check_keys(self, k: Tensor, v: Tensor, length: int | None = None) -> None:
        if length is None:
            length = self._geometry.local_len
            if self._geometry.layout.needs_slices:
                raise ContextError(
                    "attend: the plan's tokens lie in slices, but the mask is no slice; pass a "
                    "Slice, or make the plan without slice_len"
                )
        self._geometry.method.check_kind("attend", "softmax attention", METHODS)
        if k.shape[1] != length or k.shape != v.shape or k.dtype != v.dtype:
            raise ContextError(
                f"attend: k {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype} do not fit "
                f"{length} local positions of the plan; "
                "pass both as [B, T_local, heads, D], with equal shapes and dtypes"
            )

    def _check_queries(self, q: Tensor, k: Tensor, sinks: Tensor | None) -> None:
        if (
            q.shape[:2] != k.shape[:2]
            or q.shape[2] % k.shape[2]
            or q.shape[3] != k.shape[3]
            or q.dtype != k.dtype
        ):
            raise ContextError(
                f"attend: q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype} do not "
                "fit each other; pass equal batch sizes, lengths, head widths and dtypes, and a "
                "number of query heads that is a multiple of the key heads"
            )
        self._geometry.check_heads(q.shape[2], k.shape[2])
        if sinks is not None and sinks.shape != q.shape[2:3]:
            raise ContextError(
                f"attend: sinks {tuple(sinks.shape)} do not fit {q.shape[2]} query heads; "
                "pass one score per head"
            )
