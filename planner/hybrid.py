"""Costs of the two layouts of a hybrid's softmax attention layers."""

from dataclasses import dataclass

from parallel.context.config import HybridLayout
from parallel.context.linear.relayout import moved_tokens
from parallel.context.plan import Plan, make_plan
from parallel.context.traffic import sizes
from planner.attention_cost import GB, AttentionCost
from planner.cluster import Cluster
from train.config.entries import Config


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


def layout_costs(config: Config, cluster: Cluster) -> tuple[LayoutCost, ...]:
    """Return the cost of each layout that the configuration of a hybrid allows.

    An exchange moves q, k and v inward and the output outward, and their gradients in the backward: 2 x (2 heads +
    2 kv_heads) x head_dim elements of each token that changes its rank. It is not overlapped.
    """
    model, size, tp = config.model, config.mesh.context_parallel_size, config.mesh.tensor_model_parallel_size
    seq_len, batch = config.joined_length, 1 if config.packed else config.train.micro_batch_size
    heads, kv_heads = model.num_attention_heads // tp, max(1, model.query_groups // tp)
    element_size = 2 if config.train.bf16 else 4
    link = cluster.inside_gb_per_s if size * tp <= cluster.gpus_per_node else cluster.between_gb_per_s

    def plan_of(layout: HybridLayout) -> Plan:
        method = config.hybrid.context(layout).context_parallel_method
        return make_plan(method, seq_len=seq_len, size=size, multiple=tp, layout=layout)

    found = []
    for layout in config.hybrid.layouts:
        plan = plan_of(layout)
        outside = make_plan("lasp", seq_len=seq_len, size=size, multiple=plan.local_len)
        moved = moved_tokens(outside.geometry, plan.geometry) if layout != "contiguous" else 0
        exchanged = 2 * (2 * heads + 2 * kv_heads) * model.head_dim * element_size * batch * moved
        of = sizes(plan.geometry, batch, heads, kv_heads, model.head_dim, element_size)
        cost = AttentionCost(plan, of, cluster, tp)
        seconds = cost.forward() + cost.backward() + exchanged / (link * GB)
        found.append(LayoutCost(layout, int(plan.work().pairs.sum(axis=0).max()), exchanged, seconds))
    return tuple(found)


def fastest(costs: tuple[LayoutCost, ...]) -> LayoutCost:
    """Return the cost of fewer seconds, contiguous on a tie."""
    return min(costs, key=lambda cost: cost.seconds)
