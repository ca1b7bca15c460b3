"""Costs of the two layouts of a hybrid's softmax attention layers."""

from dataclasses import dataclass

from parallel.context.config import HybridConfig, HybridLayout
from parallel.context.linear.relayout import moved_tokens
from parallel.context.plan import Plan, make_plan
from parallel.context.traffic import sizes
from planner.attention_cost import GB, AttentionCost
from planner.cluster import Cluster


@dataclass(frozen=True)
class LayoutCost:
    """Softmax attention of one layer in one layout, forward and backward."""

    layout: HybridLayout
    pairs: int
    """(query, key) pairs of the busiest rank."""
    exchanged: int
    """Bytes that a rank sends to change the layout and back; 0 without a change."""
    seconds: float
    """Predicted time, exchanges included."""


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
    """Return the cost of each allowed layout; heads are per rank, ``element_size`` is in bytes, of activations.

    An exchange moves q, k and v inward and the output outward, and their gradients in the backward: 2 x (2 heads +
    2 kv_heads) x head_dim elements of each token that changes its rank. It is not overlapped.
    """
    link = cluster.inside_gb_per_s if size * tp <= cluster.gpus_per_node else cluster.between_gb_per_s

    def plan_of(layout: HybridLayout, multiple: int) -> Plan:
        method = config.context(layout).context_parallel_method
        return make_plan(method, seq_len=seq_len, size=size, multiple=multiple, layout=layout)

    found = []
    for layout in config.layouts:
        plan = plan_of(layout, tp)
        outside = make_plan("lasp", seq_len=seq_len, size=size, multiple=plan.local_len)
        moved = moved_tokens(outside.geometry, plan.geometry) if layout != "contiguous" else 0
        exchanged = 2 * (2 * heads + 2 * kv_heads) * head_dim * element_size * batch * moved
        cost = AttentionCost(plan, sizes(plan.geometry, batch, heads, kv_heads, head_dim, element_size), cluster, tp)
        pairs = int(plan.work().pairs.sum(axis=0).max())
        seconds = cost.forward() + cost.backward() + exchanged / (link * GB)
        found.append(LayoutCost(layout, pairs, exchanged, seconds))
    return tuple(found)


def faster_layout(costs: tuple[LayoutCost, ...]) -> HybridLayout:
    """Return the layout that takes fewer seconds, contiguous on a tie."""
    return min(costs, key=lambda cost: cost.seconds).layout
