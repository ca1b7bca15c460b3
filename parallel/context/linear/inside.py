"""Softmax attention in its own layout, inside a model whose tokens have another layout."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parallel.context.api import ContextParallel
from parallel.context.linear.relayout import Relayout
from parallel.context.ops import relayout_in, relayout_out
from parallel.context.plan import PLANS, Plan, PlanHandle


class InsideAttention:
    """Softmax attention in the layout of ``inside``, for tensors in the layout of ``outside``.

    ``inside`` and ``outside`` have the same ranks. Equal layouts need no exchange.
    """

    def __init__(self, inside: ContextParallel, outside: ContextParallel) -> None:
        """Prepare the exchange of tokens; raise ContextError as ``token_route`` does."""
        outer = outside.plan.geometry
        inner = inside.plan.geometry
        self.inside = inside
        self._relayout: Relayout | None = None
        if outer.layout != inner.layout:
            self._relayout = Relayout(outer, inner, inside.transport)
        # Weak keys: an entry lives as long as the micro-batch's plan of ``outside``.
        self._masked: WeakKeyDictionary[Plan, ContextParallel] = WeakKeyDictionary()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **settings: Any
    ) -> Tensor:
        """Return the attention, see ``SoftmaxAttention``; ``mask`` is a handle for ``outside``."""
        inner_mask = None if mask is None else self.inner_handle(mask)
        if self._relayout is None:
            return self.inside.attend(q, k, v, inner_mask, **settings)
        # One exchange for q, k and v together, since its latency counts more than its bytes.
        heads = [x.shape[2] for x in (q, k, v)]
        qkv = relayout_in(self._relayout, torch.cat((q, k, v), 2))  # [B, T_local, H + 2 K, D]
        q, k, v = (x.contiguous() for x in qkv.split(heads, 2))
        out = self.inside.attend(q, k, v, inner_mask, **settings)
        return relayout_out(self._relayout, out)

    def prefetch_kv(
        self, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **settings: Any
    ) -> Callable[[Tensor], Tensor]:
        """Start gathering k and v, see ``SoftmaxAttention``; return the function q -> attention.

        If the layouts differ, nothing starts before q is ready, because one exchange moves q, k and
        v.
        """
        if self._relayout is None:
            inner_mask = None if mask is None else self.inner_handle(mask)
            return self.inside.attend.prefetch_kv(k, v, inner_mask, **settings)
        return lambda q: self(q, k, v, mask, **settings)

    def inner_handle(self, mask: PlanHandle) -> PlanHandle:
        """Return the handle for ``inside`` with the same documents as a handle for ``outside``.

        The returned handle lives as long as the given one.
        """
        plan = PLANS[mask.tensor]
        return mask if plan.geometry == self.inside.plan.geometry else self.under(plan).handle

    def under(self, plan: Plan) -> ContextParallel:
        """Return ``inside`` with the documents of a plan for ``outside``.

        If the geometries differ, the result is cached per plan.
        """
        inside = self.inside
        if plan.geometry == inside.plan.geometry:  # a cached plan would keep itself alive
            return inside.under(documents=plan.cu_seqlens, window=plan.mask.window)
        if plan not in self._masked:
            window = inside.plan.mask.window
            self._masked[plan] = inside.under(documents=plan.cu_seqlens, window=window)
        return self._masked[plan]
