"""Costs of an attention of which only the rows needed travel.

Bytes as the plan counts them, and what wins where.
"""

import pytest

from parallel.context import make_plan
from parallel.context.traffic import sizes
from planner.cluster import load_cluster
from planner.layers.attention_cost import AttentionCost
from planner.layers.transfers import needed_of_all, slots
from tests.parallel.context.sparse.packings import filled, lognormal

H100 = "configs/clusters/h100_pod.toml"
CASES = [
    ("zigzag", {}),
    ("striped", {}),
    ("double_ring", {"ranks_per_node": 4}),
    ("wallfacer", {"team_size": 2}),
    ("allgather", {}),
    ("exchange", {"ranks_per_node": 4}),
    ("exchange", {"ulysses_degree": 2}),
]


def packed(method, tokens, size, **options):
    return make_plan(
        method, seq_len=tokens, size=size, documents=filled(lognormal, tokens, 0), **options
    )


@pytest.mark.parametrize(("method", "options"), CASES)
def test_all_ranks_bytes_are_the_plan_s(method, options):
    plan = packed(method, 4096, 8, **options)
    heads = {"heads": 8, "kv_heads": 4, "head_dim": 16, "element_size": 2}
    shape_sizes = sizes(plan.geometry, 1, *heads.values())
    costs = [plan.cost(rank, batch=1, **heads) for rank in range(8)]
    for moves, way, gradients in ((None, "forward", False), ("kv", "backward", True)):
        sent = [getattr(cost, way) for cost in costs]
        between = sum(traffic.between_nodes(rank, 4) for rank, traffic in enumerate(sent))
        assert needed_of_all(plan, shape_sizes, moves, 4) == (
            sum(traffic.total for traffic in sent) - between,
            between,
        )
        all_slots = slots(plan, shape_sizes, "kv", gradients=gradients)
        apart = [(slot.size[slot.ranks != slot.peers]).sum() for slot in all_slots]
        assert sum(apart) == pytest.approx(sum(traffic.p2p.total() for traffic in sent))


def seconds(method, tokens, size, **options):
    plan = packed(method, tokens, size, **options)
    cost = AttentionCost(plan, sizes(plan.geometry, 1, 32, 8, 128, 2), load_cluster(H100))
    return cost.forward() + cost.backward()


def test_an_exchange_is_predicted_to_win_between_nodes_and_not_to_lose_inside_one():
    """128K log-normal tokens on 32 ranks in nodes of 8, and on 8 ranks of one."""
    exchange = seconds("exchange", 131072, 32, ranks_per_node=8)
    assert exchange < seconds("exchange", 131072, 32)
    for method in ("zigzag", "striped", "allgather"):
        assert exchange < 0.6 * seconds(method, 131072, 32)
        assert seconds("exchange", 131072, 8) < 1.05 * seconds(method, 131072, 8)
