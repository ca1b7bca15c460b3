"""Tokens that go from one layout to another on real gloo ranks.

Unshard and shard, gradients, bytes, and refusals.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from parallel.context import ContextError, context_parallel, make_plan, ops, plan
from parallel.context.linear.inside import InsideAttention
from parallel.context.linear.relayout import Relayout, moved_tokens, token_route
from parallel.context.plan import PLANS
from runtime.ranks import run_ranks

LENGTH, SHAPE = 21, (3, 2)
PAIRS = [("lasp", "zigzag"), ("lasp", "striped"), ("striped", "zigzag"), ("lasp", "ring")]


def whole(length, seed):
    return torch.randn(
        2, length, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def both(rank, world_size, wrong=False):
    """A tensor and a gradient as they arrive, each way.

    This rank's share of the whole in that layout stands beside them.
    """
    results = []
    for outer, inner in PAIRS:
        inside = context_parallel(inner, seq_len=LENGTH, group=dist.group.WORLD, multiple=2)
        outside = context_parallel(
            outer, seq_len=LENGTH, group=dist.group.WORLD, multiple=inside.plan.local_len
        )
        relayout = Relayout(outside.plan.geometry, inside.plan.geometry, inside.transport)
        if wrong:
            relayout._routes = tuple(
                way._replace(targets=torch.arange(len(way.targets))) for way in relayout._routes
            )
        values, gradients = (whole(inside.plan.padded_len, seed) for seed in (1, 2))
        for go, source, target in (
            (ops.relayout_in, outside, inside),
            (ops.relayout_out, inside, outside),
        ):
            x = source.shard(values, 1).requires_grad_()
            before = inside.transport.traffic.total
            y = go(relayout, x)
            sent = inside.transport.traffic.total - before
            y.backward(target.shard(gradients, 1))
            assert x.grad is not None
            pairs = ((y.detach(), target.shard(values, 1)), (x.grad, source.shard(gradients, 1)))
            plans = outside.plan.geometry, inside.plan.geometry
            max_bytes = moved_tokens(*plans) * 2 * 3 * 2 * 8
            results.append(
                {"equal": [torch.equal(*pair) for pair in pairs], "sent": sent, "most": max_bytes}
            )
    return results


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_exchange_is_unshard_and_shard_and_its_gradient_the_way_back(ranks):
    results = run_ranks(both, ranks)
    for index in range(2 * len(PAIRS)):
        assert all(all(result[index]["equal"]) for result in results), PAIRS[index // 2]
        assert max(result[index]["sent"] for result in results) == results[0][index]["most"]
    assert all(
        result[index]["sent"] == 0 for result in results for index in (6, 7)
    )  # of one layout


def test_tokens_left_in_the_order_of_their_arrival_would_be_seen():
    results = run_ranks(partial(both, wrong=True), 2)
    assert not all(all(entry["equal"]) for result in results for entry in result)


def test_few_tokens_stay():
    """From contiguous to zigzag over P ranks a rank sends all of its tokens, or half of them."""
    outside, inside = (
        make_plan(method, seq_len=64, size=4).geometry for method in ("lasp", "zigzag")
    )
    unmoved = [token_route(outside, inside, rank).sends[rank] for rank in range(4)]
    assert unmoved == [8, 0, 8, 0]
    assert moved_tokens(outside, inside) == 16


def test_plans_of_other_lengths_or_ranks_are_refused():
    for outer, inner in (
        (("lasp", 17, 2), ("zigzag", 17, 2)),
        (("lasp", 16, 2), ("zigzag", 16, 4)),
    ):
        plans = [
            make_plan(method, seq_len=length, size=size).geometry
            for method, length, size in (outer, inner)
        ]
        with pytest.raises(
            ContextError, match=r"tokens cannot move from .* make the first plan with multiple="
        ):
            token_route(*plans, 0)


def test_one_layout_exchanges_nothing():
    ring = context_parallel("ring", seq_len=8)
    attend = InsideAttention(ring, context_parallel("lasp", seq_len=8))
    x = torch.randn(1, 8, 2, 4)
    assert torch.equal(attend(x, x, x), ring.attend(x, x, x))
    assert torch.equal(attend.prefetch_kv(x, x)(x), ring.attend(x, x, x))
    assert attend._relayout is None


def test_a_mask_of_the_outer_layout_is_that_of_the_inner_one():
    inside, outside = context_parallel("ring", seq_len=8), context_parallel("lasp", seq_len=8)
    attend, x = InsideAttention(inside, outside), torch.randn(1, 8, 2, 4)
    masks = [(0, 3, 8), (0, 5, 8)]
    handles = [outside.under(documents=cu_seqlens).handle for cu_seqlens in masks]
    for cu_seqlens, handle in zip(masks, handles, strict=True):
        assert torch.equal(
            attend(x, x, x, handle), inside.under(documents=cu_seqlens).attend(x, x, x)
        )
        inner_handle = attend.inner_handle(handle)
        assert inner_handle is attend.inner_handle(handle)
        assert PLANS[inner_handle.tensor].geometry == inside.plan.geometry
    assert not torch.equal(attend(x, x, x, handles[0]), attend(x, x, x, handles[1]))


def test_a_plan_of_the_outer_layout_that_is_gone_leaves_none_of_the_inner_one():
    for outer in ("lasp", "ulysses"):
        inside, outside = context_parallel("ulysses", seq_len=8), context_parallel(outer, seq_len=8)
        attend = InsideAttention(inside, outside)
        handle = outside.under(documents=(0, 3, 8)).handle
        inner_plan = PLANS[attend.inner_handle(handle).tensor]
        assert inner_plan.cu_seqlens == (0, 3, 8)
        assert inner_plan is attend.under(PLANS[handle.tensor]).plan
        gone = weakref.ref(inner_plan)
        del inner_plan, handle
        plan._packed.cache_clear()
        gc.collect()
        assert gone() is None
