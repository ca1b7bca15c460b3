"""Steps without and within the link's limit, and the bytes of attention that cross it, measured and by the plan."""

from collections.abc import Callable
from statistics import median
from typing import Any

from bench.link.network import Network
from bench.link.ranks import Iteration
from parallel.context import Plan, make_plan
from train.config.entries import Config

WARM_UP_LIMITED = 1
"""Steps within the limit that do not count: TCP finds its window."""


def medians(
    network: Network, rate: str, run: Callable[[Callable[[int], None]], list[Iteration]], warm_up: int, free: int
) -> dict[str, Any]:
    """Return the medians of the iterations of ``run(before)``: ``warm_up`` and ``free`` without the limit, then within.

    The first within the limit does not count.
    """
    begin = warm_up + free

    def limit(iteration: int) -> None:
        if iteration in (0, begin):
            network.limit(rate if iteration else None)

    steps = run(limit)
    limited = steps[begin + WARM_UP_LIMITED :]
    return {
        "seconds": [step.seconds for step in limited],
        "median": median(step.seconds for step in limited),
        "unlimited": median(step.seconds for step in steps[warm_up:begin]),
        "crossed": max(median(step.there for step in limited), median(step.back for step in limited)),
    }


def attention_crossing(config: Config, ranks_per_node: int) -> tuple[int, int]:
    """Return the bytes that a step's attentions send from the first node to the second, and back, by the plan.

    Zero with tensor parallelism, whose layers send their tokens outside of the plan.
    """
    model, sent = config.model, [0, 0]
    plan = make_plan(
        config.context.context_parallel_method,
        seq_len=config.train.seq_length,
        size=config.mesh.context_parallel_size,
        **config.context.plan_arguments(ranks_per_node),
    )
    for layer in range(model.num_layers):
        turned = model.model_type == "transnormer" and layer == 0  # LRPE doubles queries and keys
        crossing = plan_crossing(
            plan,
            ranks_per_node,
            batch=config.train.micro_batch_size,
            heads=model.num_attention_heads,
            kv_heads=model.query_groups,
            head_dim=model.head_dim * (2 if turned else 1),
            value_dim=model.head_dim,
            element_size=4,
        )
        sent = [before + more for before, more in zip(sent, crossing, strict=True)]
    return sent[0], sent[1]


def plan_crossing(plan: Plan, ranks_per_node: int, **sizes: Any) -> tuple[int, int]:
    """Return the bytes that one attention sends from the first node to the second, and back; as ``plan.cost``."""
    sent = [0, 0]
    for rank in range(plan.size):
        cost = plan.cost(rank, **sizes)
        for traffic in (cost.forward, cost.backward):
            sent[rank // ranks_per_node] += traffic.between_nodes(rank, ranks_per_node)
    return sent[0], sent[1]
