"""Softmax attention in a layout of its own, inside a model of another layout."""

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
    """The softmax attention of ``inside`` for tensors and masks of ``outside``, over the same
    ranks.

    Equal layouts need no exchange.
    """

    def __init__(self, inside: ContextParallel, outside: ContextParallel) -> None:
        """Raise ContextError as ``token_route`` does."""
        geometries = outside.plan.geometry, inside.plan.geometry
        equal = geometries[0].layout == geometries[1].layout
        self.inside = inside
        self._relayout = None if equal else Relayout(*geometries, inside.transport)
        self._masked: WeakKeyDictionary[Plan, ContextParallel] = WeakKeyDictionary()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **settings: Any
    ) -> Tensor:
        """Return the attention, as ``SoftmaxAttention`` does; ``mask`` is a handle of ``outside``."""
        mask = None if mask is None else self.own(mask)
        if self._relayout is None:
            return self.inside.attend(q, k, v, mask, **settings)
        heads = [x.shape[2] for x in (q, k, v)]
        q, k, v = relayout_in(self._relayout, torch.cat((q, k, v), 2)).split(
            heads, 2
        )  # one exchange for all three
        out = self.inside.attend(q.contiguous(), k.contiguous(), v.contiguous(), mask, **settings)
        return relayout_out(self._relayout, out)

    def prefetch_kv(
        self, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **settings: Any
    ) -> Callable[[Tensor], Tensor]:
        """Do as ``SoftmaxAttention.prefetch_kv``; between two layouts nothing starts before q is
        there.
        """
        if self._relayout is None:
            own = None if mask is None else self.own(mask)
            return self.inside.attend.prefetch_kv(k, v, own, **settings)
        return lambda q: self(q, k, v, mask, **settings)

    def own(self, mask: PlanHandle) -> PlanHandle:
        """Return the handle of ``inside`` for the documents of a handle of ``outside``; it lives as
        long as that.
        """
        plan = PLANS[mask.tensor]
        return mask if plan.geometry == self.inside.plan.geometry else self.under(plan).handle

    def under(self, plan: Plan) -> ContextParallel:
        """Return ``inside`` under the documents of a plan of ``outside``; made once for a plan of
        another geometry.
        """
        inside = self.inside
        if plan.geometry == inside.plan.geometry:  # the same plan, which must not keep itself alive
            return inside.under(documents=plan.documents, window=plan.mask.window)
        if plan not in self._masked:
            self._masked[plan] = inside.under(
                documents=plan.documents, window=inside.plan.mask.window
            )
        return self._masked[plan]
