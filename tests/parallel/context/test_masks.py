"""Masks that change from one call to the next over the same ranks.

The same bits as each mask on its own.
"""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from parallel.context import ContextError, context_parallel, executor, plan, transport
from parallel.context.linear import state
from runtime.ranks import run_ranks

LENGTH, HEADS, WIDTH = 43, 4, 8
MASKS = [(0, 7, 30, 43), (0, 20, 43), None]
SOFTMAX = [
    ("zigzag", {}),
    ("striped", {"ulysses_degree": 2}),
    ("allgather", {}),
    ("exchange", {}),
]
LINEAR = [("lasp", {}), ("lasp2", {}), ("ulysses", {})]
TEAMS = [("wallfacer", {"team_size": 2})]


def attention(cp, linear):
    return (
        (lambda q, k, v: cp.attend_linear(q, k, v, [-0.1 * head for head in range(HEADS)]))
        if linear
        else cp.attend
    )


def leaves(cp, seed):
    generator = torch.Generator().manual_seed(seed)
    whole = (torch.randn(2, LENGTH, HEADS, WIDTH, generator=generator) for _ in range(3))
    return [cp.shard(x, 1).requires_grad_() for x in whole]


def steps(masked, linear):
    """[out, dq, dk, dv] of two micro-batches under each mask.

    All go forward before the first goes back.
    """
    inputs = [leaves(cp, seed) for seed in range(2) for cp in masked]
    outs = [attention(cp, linear)(*x) for cp, x in zip(masked * 2, inputs, strict=True)]
    order = [3, 0, 4, 2, 5, 1]
    steps_by_index = {
        i: [outs[i].detach(), *torch.autograd.grad(outs[i].square().sum(), inputs[i])]
        for i in order
    }
    return [steps_by_index[i] for i in sorted(steps_by_index)]


def compare_case(method, options, linear, group_calls):
    def join(mask):
        return context_parallel(
            method, seq_len=LENGTH, group=dist.group.WORLD, documents=mask, **options
        )

    by_mask = [steps([join(mask)] * 3, linear)[::3] for mask in MASKS]
    want = [results for micro_batch in zip(*by_mask, strict=True) for results in micro_batch]
    cp_first = join(MASKS[0])
    registries = executor.EXECUTORS, state.STATE_EXECUTORS, transport.HEAD_EXCHANGES
    gc.collect()  # those made above are gone
    before = len(group_calls), [len(registry) for registry in registries]
    masked = [cp_first, *(cp_first.under(documents=mask) for mask in MASKS[1:])]
    got = steps(masked, linear)
    assert (len(group_calls), [len(registry) for registry in registries]) == before
    assert not torch.equal(got[0][0], got[1][0])
    assert not torch.equal(got[1][1], got[2][1])
    return [
        [torch.equal(a, b) for a, b in zip(*pair, strict=True)]
        for pair in zip(got, want, strict=True)
    ]


def compare(rank, world_size, cases, linear):
    """Compare out and gradients under changing masks.

    The others are of ranks joined for each mask alone.
    """
    new_group, group_calls = dist.new_group, []

    def noting(*args, **named):
        group_calls.append(1)
        return new_group(*args, **named)

    dist.new_group = noting
    pairs = [pair for case in cases for pair in compare_case(*case, linear, group_calls)]
    assert group_calls or world_size == 2  # a team has a group of its own
    return pairs


@pytest.mark.parametrize(
    ("world_size", "cases", "linear"), [(2, SOFTMAX, False), (2, LINEAR, True), (4, TEAMS, False)]
)
def test_masks_in_turn_are_those_of_ranks_joined_for_each_and_make_no_group_or_operator(
    world_size, cases, linear
):
    for pairs in run_ranks(compare, world_size, cases, linear):
        assert pairs == [[True] * 4] * len(pairs)
        assert len(pairs) == 2 * len(MASKS) * len(cases)


def with_the_latest_mask(rank, world_size, cases, linear):
    """Every backward takes the mask of the last forward, whichever that was."""
    owner = state.StateExecutor if linear else executor.Executor
    forward, backward, latest = owner.forward, owner.backward, {}

    def noting(self, plan, *args):
        latest[self] = plan
        return forward(self, plan, *args)

    owner.forward, owner.backward = (
        noting,
        lambda self, plan, *args: backward(self, latest[self], *args),
    )
    return compare(rank, world_size, cases, linear)


@pytest.mark.parametrize(("case", "linear"), [(SOFTMAX[0], False), (LINEAR[0], True)])
def test_a_backward_with_another_mask_than_its_forward_would_be_seen(case, linear):
    for pairs in run_ranks(with_the_latest_mask, 2, [case], linear):
        assert all(out for out, *_ in pairs)
        assert not all(all(gradients) for _, *gradients in pairs)


def test_a_backward_outlives_the_mask_and_all_caches_of_it():
    q = torch.randn(1, 16, 2, 8, requires_grad=True)

    def attended():
        return (
            context_parallel("ring", seq_len=16).under(documents=(0, 5, 16)).attend(q, q, q).sum()
        )

    (want,) = torch.autograd.grad(attended(), q)
    out = attended()
    for cache in (plan._whole, plan._packed, plan._work):
        cache.cache_clear()
    gc.collect()
    assert torch.equal(torch.autograd.grad(out, q)[0], want)


@pytest.mark.parametrize("moves", ["kv", "queries"])
def test_what_is_planned_ahead_is_not_planned_again(moves, monkeypatch):
    q = torch.randn(1, 16, 2, 8, requires_grad=True)
    cp = context_parallel("exchange", seq_len=16, backward=moves).under(documents=(0, 5, 16))
    cp.plan_ahead((None, (3, 0)))
    for name in ("Flow", "rank_schedule"):
        monkeypatch.setattr(plan, name, None)
    for window in (None, (3, 0)):
        cp.attend(q, q, q, window=window).sum().backward()
    with pytest.raises(TypeError, match="not callable"):
        cp.attend(q, q, q, window=(4, 0))


def test_plans_of_past_micro_batches_are_forgotten():
    plan_refs = [
        weakref.ref(plan.make_plan("exchange", seq_len=64, size=2, documents=(0, n, 64)))
        for n in range(1, 60)
    ]
    for plan_ref in plan_refs[-1:]:
        plan_ref().schedule(0)
    gc.collect()
    assert sum(plan_ref() is not None for plan_ref in plan_refs) <= 16


def test_a_layer_with_a_window_keeps_the_layout_of_those_without():
    packed = {"documents": (0, 1000, 4096)}
    whole, alone = (
        plan.make_plan("exchange", seq_len=4096, size=8, window=w, **packed)
        for w in (None, (64, 0))
    )
    assert whole.windowed((64, 0)).layout == whole.layout != alone.layout
    assert alone.windowed((64, 0)) is alone


def test_masks_of_other_ranks_and_sinks_of_other_heads_are_refused():
    q = torch.randn(1, 16, 2, 8)
    ring, lasp = (context_parallel(method, seq_len=16) for method in ("ring", "lasp"))
    ring_mask, lasp_mask = (
        context_parallel(method, seq_len=24).handle for method in ("ring", "lasp")
    )
    with pytest.raises(ContextError, match="mask is for ring over 24 tokens on 1 ranks"):
        ring.attend(q, q, q, ring_mask)
    with pytest.raises(ContextError, match="mask is for lasp over 24"):
        lasp.attend_linear(q, q, q, [0.0, 0.0], lasp_mask)
    for shape in ((1,), (3,), (2, 1)):
        with pytest.raises(ContextError, match="do not fit 2 query heads"):
            ring.attend(q, q, q, sinks=torch.zeros(shape))


def test_a_compiled_attention_serves_every_mask():
    """Compiled once: the plan is a tensor.

    A plan's number as an int, as executors have theirs, compiles again.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    cp_first = context_parallel("ring", seq_len=16)
    other = cp_first.under(documents=(0, 5, 16))
    q = torch.randn(1, 16, 2, 8, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda attend, q: attend(q, q, q).square().sum(), backend=counter, fullgraph=True
    )
    for cp in (cp_first, other, cp_first):
        (got,) = torch.autograd.grad(compiled(cp.attend, q), q)
        (want,) = torch.autograd.grad(cp.attend(q, q, q).square().sum(), q)
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1
