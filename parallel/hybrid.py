"""Hybrids: which method and which layout their layers of softmax attention have, beside those of linear attention."""

from dataclasses import dataclass
from typing import Literal

from parallel.attention_cost import GB, AttentionCost
from parallel.cluster import Cluster
from parallel.context.config import ContextConfig
from parallel.context.errors import ContextError
from parallel.context.plan import Plan
from parallel.context.planning import make_plan
from parallel.context.relayout import moved_tokens
from parallel.context.traffic import sizes

HybridLayout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[HybridLayout, ...] = ("contiguous", "zigzag")


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """How the context-parallel processes share the softmax attention of a model that has linear attention too."""

    hybrid_softmax_method: Literal["ring", "allgather", "ulysses"] = "ring"
    """Communication of the layers of softmax attention; context_parallel_method is that of the linear ones."""
    hybrid_softmax_layout: Literal["auto", "contiguous", "zigzag"] = "auto"
    """Who owns which tokens in them. Linear attention needs contiguous ones, of which a causal mask gives the last rank
    most work; zigzag balances it, and an all-to-all before and after the attention goes from one layout to the other.
    auto takes what the cost model finds faster on the cluster."""

    def context(self, layout: HybridLayout) -> ContextConfig:
        """The configuration of a model whose attention is all softmax, in this layout."""
        zigzag_ring = self.hybrid_softmax_method == "ring" and layout == "zigzag"
        method = "zigzag" if zigzag_ring else self.hybrid_softmax_method
        return ContextConfig(context_parallel_method=method, context_parallel_layout=layout)

    @property
    def layouts(self) -> tuple[HybridLayout, ...]:
        """Those that may be taken."""
        if self.hybrid_softmax_method == "ulysses":
            return ("contiguous",)
        return LAYOUTS if self.hybrid_softmax_layout == "auto" else (self.hybrid_softmax_layout,)

    def check(self, *, seq_len: int, size: int, heads: int, kv_heads: int) -> None:
        """Refuse what ``size`` ranks with these heads each cannot do. Needs no processes.

        Raises:
            ContextError: with the reason and what would work.
        """
        if self.hybrid_softmax_layout == "zigzag" and self.hybrid_softmax_method == "ulysses":
            raise ContextError(
                "hybrid_softmax_layout is zigzag and hybrid_softmax_method is ulysses, after whose exchange of heads "
                "every rank has the whole sequence and the same work in any layout; use contiguous or auto, or method "
                "ring or allgather"
            )
        for layout in self.layouts:
            self.context(layout).check(seq_len=seq_len, size=size, heads=heads, kv_heads=kv_heads, ranks_per_node=None)


@dataclass(frozen=True)
class LayoutCost:
    """The softmax attention of one layer in one layout, forward and backward."""

    layout: HybridLayout
    pairs: int
    """(query, key) pairs of the rank that has most."""
    exchanged: int
    """Bytes that a rank sends to change the layout and back; 0 where there is no change."""
    seconds: float
    """By the cost model, exchanges included."""


def layout_costs(
    config: HybridConfig,
    *,
    seq_len: int,
    size: int,
    tp: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element_size: int,
    cluster: Cluster,
) -> tuple[LayoutCost, ...]:
    """What each layout that may be taken costs; heads are those of one rank, ``element_size`` bytes of activations.

    An exchange moves q, k and v inward and the output outward, and in the backward their gradients: 2 x (2 heads +
    2 kv_heads) x head_dim elements of each token that changes its rank. It is not overlapped with anything.
    """
    link = cluster.inside_gb_per_s if size * tp <= cluster.gpus_per_node else cluster.between_gb_per_s

    def plan_of(layout: HybridLayout, multiple: int) -> Plan:
        method = config.context(layout).context_parallel_method
        return make_plan(method, seq_len=seq_len, size=size, multiple=multiple, layout=layout)

    found = []
    for layout in config.layouts:
        plan = plan_of(layout, tp)
        outside = make_plan("lasp", seq_len=seq_len, size=size, multiple=plan.local_len)
        moved = moved_tokens(outside, plan) if layout != "contiguous" else 0
        exchanged = 2 * (2 * heads + 2 * kv_heads) * head_dim * element_size * batch * moved
        cost = AttentionCost(plan, sizes(plan, batch, heads, kv_heads, head_dim, element_size), cluster, tp)
        pairs = int(plan.work().pairs.sum(axis=0).max())
        seconds = cost.forward() + cost.backward() + exchanged / (link * GB)
        found.append(LayoutCost(layout, pairs, exchanged, seconds))
    return tuple(found)


def faster_layout(costs: tuple[LayoutCost, ...]) -> HybridLayout:
    """The one that takes fewer seconds; contiguous where they are the same."""
    return min(costs, key=lambda cost: cost.seconds).layout
