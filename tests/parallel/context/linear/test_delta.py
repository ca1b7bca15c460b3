"""The gated delta rule over real gloo ranks against the recurrence in one process, in float64."""

from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels.ops import delta_rule
from parallel import recompute
from parallel.context import ContextError, Traffic, context_parallel, make_plan
from parallel.context.linear import delta
from parallel.context.linear import segments as scanned
from parallel.context.linear.segments import SCHEDULES, segments
from runtime.ranks import run_ranks
from tests.compositions import CONSECUTIVE
from tests.parallel.context.linear.cases import CU_SEQLENS, delta_traffic, with_gradients

BATCH, KEYS, WIDTH, VALUES = 2, 2, 6, 5
TEAMS = [
    ("wallfacer", {"layout": "zigzag", "team_size": 2}),
    ("double_ring", {"layout": "contiguous", "ranks_per_node": 2}),
]
"""Methods for 4 ranks, in their layouts of consecutive tokens."""


class Case(NamedTuple):
    """A layout, the sequence, value heads of a key head, and a schedule.

    None in the place of value heads is a gate per channel.
    """

    layout: tuple[str, dict[str, Any]]
    length: int
    cu_seqlens: tuple[int, ...] | None
    shared: int | None
    schedule: str = "auto"

    def made(self, make, **others):
        """A plan or a context of it."""
        method, options = self.layout
        arguments = {
            "seq_len": self.length,
            "documents": self.cu_seqlens,
            "delta_rule_schedule": self.schedule,
        }
        return make(method, **arguments, **options, **others)


SEQUENCES = [
    (251, None, 1),
    (5, None, 2),
    (251, CU_SEQLENS, 2),
    (251, CU_SEQLENS, None),
    (256, (0, 64, 96, 128, 256), 1),
    (40, tuple(range(41)), 1),
]
LAYOUT_CASES = [Case(layout, *sequence) for layout in CONSECUTIVE for sequence in SEQUENCES]
TEAM_CASES = [
    Case(layout, 251, cu_seqlens, 1) for layout in TEAMS for cu_seqlens in (None, CU_SEQLENS)
]


def cases_of(size, schedules=0):
    """All cases of this many ranks, each with a schedule by turns, or with every one."""
    cases = LAYOUT_CASES + TEAM_CASES * (size == 4)
    if size == 1:
        return cases
    names = [*SCHEDULES]
    chosen = [
        names if schedules else [names[(i + i // 6 + size) % len(names)]] for i in range(len(cases))
    ]
    return [
        case._replace(schedule=name)
        for case, schedules_of in zip(cases, chosen, strict=True)
        for name in schedules_of
    ]


def inputs(length, shared):
    """q, k, v, g, beta and the gradient of out, the same on every rank."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(BATCH, length, *shape, generator=generator, dtype=torch.float64)

    heads = KEYS * (shared or 1)
    q, k = (F.normalize(draw(KEYS, WIDTH), dim=-1) for _ in range(2))
    g = -0.02 * draw(heads, *([] if shared else [WIDTH])).abs()
    return [q, k, draw(heads, VALUES), g, 2 * torch.sigmoid(draw(heads)), draw(heads, VALUES)]


@cache
def truth(length, cu_seqlens, shared):
    def attend(*tensors):
        return delta_rule(*tensors, cu_seqlens=cu_seqlens, backend="reference")[0]

    return with_gradients(attend, inputs(length, shared))


def errors(got, want):
    """Errors by the norm, or by 1: documents of one token give gates no gradient."""
    names = "out", "dq", "dk", "dv", "dg", "dbeta"
    return {
        name: ((a - b).norm() / b.norm().clamp(min=1)).item()
        for name, a, b in zip(names, got, want, strict=True)
    }


def worst(got, case):
    return max(errors(got, truth(case.length, case.cu_seqlens, case.shared)).values())


def attend_on_ranks(rank, world_size, cases, fault=None):
    """out, dq, dk, dv, dg and dbeta of the whole sequence for each case, and bytes sent."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            fault(patch)
        for case in cases:
            cp = case.made(context_parallel, group=dist.group.WORLD)
            padding = (cp.positions >= case.length).nonzero().flatten()
            local = [cp.shard(x, dim=1) for x in inputs(case.length, case.shared)]
            local = [
                x.index_fill(1, padding, torch.nan) for x in local
            ]  # what padding holds must reach nothing
            tensors = [cp.unshard(x, 1) for x in with_gradients(cp.attend_delta, local)]
            results.append((tensors if rank == 0 else [], cp.transport.traffic))
    return results


def planned_traffic(case, rank, size):
    """Bytes of states along their plan, forward and backward."""
    plan = case.made(make_plan, size=size)
    state, square = (
        BATCH * KEYS * (case.shared or 1) * WIDTH * width * 8 for width in (VALUES, WIDTH)
    )
    ways = [delta_traffic(plan, rank, state, square, gradient=way) for way in (False, True)]
    return Traffic(ways[0].p2p + ways[1].p2p)


def check(size, cases):
    results = run_ranks(attend_on_ranks, size, cases)
    for index, case in enumerate(cases):
        assert worst(results[0][index][0], case) <= 1e-12, case
        for rank, result in enumerate(results):
            assert result[index][1] == planned_traffic(case, rank, size), case


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_layouts_documents_and_schedules_are_exact_and_send_what_the_plan_says(size):
    check(size, cases_of(size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_schedule_of_every_case_is_exact(size):
    check(size, cases_of(size, schedules=True))


def hard_inputs():
    """Gates of -100 on one token in eight, and keys that are all equal on every other head."""
    q, k, v, g, beta, dout = inputs(251, 1)
    g[:, ::8] = -100
    k[:, :, 0] = k[:1, :1, 0]
    return [q, k, v, g, beta / 2, dout]


def hard_on_ranks(rank, world_size):
    results = []
    for (method, options), schedule in product(CONSECUTIVE, SCHEDULES):
        cp = context_parallel(
            method, seq_len=251, group=dist.group.WORLD, delta_rule_schedule=schedule, **options
        )
        local = with_gradients(cp.attend_delta, [cp.shard(x, 1).float() for x in hard_inputs()])
        results.append([cp.unshard(x, 1).double() for x in local])
    return results


def test_float32_keeps_its_digits_under_strong_gates_and_equal_keys():
    want = with_gradients(lambda *x: delta_rule(*x, backend="reference")[0], hard_inputs())
    for got in run_ranks(hard_on_ranks, 4)[0]:
        assert max(errors(got, want).values()) <= 5e-6


def decay_alone(patch):
    """M replaced by the decay of linear attention."""
    wide_scan = delta.rule.wide_scan

    def without(q, k, v, g, beta, backend):
        out, reads, states = wide_scan(q, k, v, g, beta, backend=backend)
        states[-1, ..., v.shape[-1] :] = torch.diag_embed(
            g.sum(1).exp()[..., None].expand(*states.shape[1:4])
        )
        return out, reads, states

    patch.setattr(delta.rule, "wide_scan", without)


def documents_joined(patch):
    """Documents that are not told apart."""
    patch.setattr(scanned, "gates_with_resets", lambda g, cu_seqlens: g)


def maps_out_of_order(patch):
    """Maps composed as if the later came first."""
    composed = delta._composed
    patch.setattr(
        delta,
        "_composed",
        lambda earlier, later: (
            composed(earlier, later) if len(earlier) == 1 else composed(later, earlier)
        ),
    )


@pytest.mark.parametrize(
    ("fault", "case", "schedules"),
    [
        (decay_alone, LAYOUT_CASES[0], [*SCHEDULES]),
        (documents_joined, LAYOUT_CASES[2], [*SCHEDULES]),
        (maps_out_of_order, LAYOUT_CASES[6], ["tree"]),
    ],
)
def test_faults_show(fault, case, schedules):
    cases = [case._replace(schedule=schedule) for schedule in schedules]
    for got, _ in run_ranks(attend_on_ranks, 3, cases, fault)[0]:
        assert worst(got, case) > 1e-3


def test_who_has_which_segments():
    zigzag = segments(make_plan("zigzag", seq_len=16, size=2))
    assert [
        [(x.start, x.length, x.depth, x.num_after, x.previous_rank, x.next_rank) for x in rank]
        for rank in zigzag
    ] == [
        [(0, 4, 0, 2, None, 1), (12, 4, 2, 0, 1, None)],
        [(4, 8, 1, 1, 0, 0)],  # the two middle chunks touch
    ]
    plan = make_plan("ring", seq_len=29, size=4, documents=(0, 8, 12, 29), layout="contiguous")
    kinds = [[len(kind) for kind in scanned.parts(plan, rank)] for rank in range(4)]
    assert kinds == [
        [0, 0, 1, 0],
        [1, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 1, 0, 0],
    ]  # 5 tokens of 8 do not wait


def heads_ahead(rank, world_size):
    """Heads of each scan that did not wait for its state."""
    heads, wide_scan = [], delta.rule.wide_scan

    def counted(q, k, v, *others, **options):
        heads.append(v.shape[2])
        return wide_scan(q, k, v, *others, **options)

    delta.rule.wide_scan = counted
    cp = context_parallel("ring", seq_len=251, group=dist.group.WORLD, layout="contiguous")
    cp.attend_delta(*(cp.shard(x, 1) for x in inputs(251, 2)[:5]))
    return heads


def test_heads_take_their_turns_where_a_document_lies_on_two_ranks():
    assert run_ranks(heads_ahead, 2) == [
        [],
        [2],
    ]  # a key head's two of four; the states of the others come meanwhile
    assert run_ranks(heads_ahead, 3) == [[], [4], [4]]


def test_calls_and_masks_that_do_not_fit_are_named():
    tensors = inputs(16, 1)[:5]
    with pytest.raises(ContextError, match="states pass along consecutive tokens"):
        segments(make_plan("striped", seq_len=16, size=2))
    cp = context_parallel("zigzag", seq_len=16)
    with pytest.raises(ContextError, match="16 local positions"):
        cp.attend_delta(*(x[:, :8] for x in tensors))
    with pytest.raises(ContextError, match=r"attend_delta: .*beta"):
        cp.attend_delta(*tensors[:4], tensors[4][..., :1])
    for options, words in (
        ({"window": (3, 0)}, r"window \(3, 0\)"),
        ({"causal": False}, "a full mask"),
    ):
        with pytest.raises(ContextError, match=f"the plan has {words}"):
            context_parallel("ring", seq_len=16, **options).attend_delta(*tensors)


def convolved_layer(cp, others, weight):
    """A convolution of q before the rule."""
    return lambda q: cp.attend_delta(cp.convolve(q.flatten(2), weight).view_as(q), *others)


def test_it_compiles_whole():
    cp = context_parallel("zigzag", seq_len=16, documents=(0, 5, 16))
    attend = torch.compile(cp.attend_delta, fullgraph=True, backend="aot_eager")
    compiled, want = (
        with_gradients(function, inputs(16, 1)) for function in (attend, cp.attend_delta)
    )
    torch.testing.assert_close(compiled, want, rtol=0, atol=0)


def under_policies(rank, world_size):
    """dq, and bytes of a convolution and an attention.

    They are in a layer whose activations are computed again.
    """
    results = []
    for attention_kept in (None, True, False):
        cp = context_parallel("zigzag", seq_len=64, group=dist.group.WORLD)
        q, *others, dout = (cp.shard(x, 1) for x in inputs(64, 1))
        layer = convolved_layer(
            cp, others, torch.ones(KEYS * WIDTH, 4, dtype=torch.float64, requires_grad=True)
        )
        q.requires_grad_()
        out = (
            layer(q)
            if attention_kept is None
            else recompute._recomputed(layer, attention_kept, None, q)
        )
        out.backward(dout)
        results.append((q.grad, cp.transport.traffic.total))
    return results


def test_attention_boundary_sends_the_convolutions_rows_again_alone():
    results = run_ranks(under_policies, 2)[0]
    assert all(torch.equal(results[0][0], gradient) for gradient, _ in results)
    once, boundary, full = (count for _, count in results)
    rows = 3 * KEYS * WIDTH * BATCH * 8
    assert once + rows == boundary < full


def test_the_backward_outlives_the_object_that_attended():
    tensors = [x.requires_grad_() for x in inputs(16, 1)[:5]]
    context_parallel("zigzag", seq_len=16).attend_delta(*tensors).sum().backward()
    want = torch.autograd.grad(
        partial(delta_rule, backend="reference")(*tensors)[0].sum(), tensors[0]
    )[0]
    torch.testing.assert_close(tensors[0].grad, want)
