"""The gated delta rule over real gloo ranks against the recurrence in one process, in float64."""

from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kernels.delta.rule import delta_rule
from parallel import recompute
from parallel.context import ContextError, Traffic, context_parallel, make_plan
from parallel.context.linear import delta
from parallel.context.linear import segments as scanned
from parallel.context.linear.segments import SCHEDULES, segments
from runtime.ranks import run_ranks
from tests.parallel.context.linear.cases import DOCUMENTS, LAYOUTS, delta_traffic, with_gradients

BATCH, KEYS, WIDTH, VALUES = 2, 2, 6, 5
TEAMS = [
    ("wallfacer", {"layout": "zigzag", "team_size": 2}),
    ("double_ring", {"layout": "contiguous", "ranks_per_node": 2}),
]
"""Methods for 4 ranks, in their layouts of consecutive tokens."""
CASES = [
    (layout, length, documents, shared)
    for layout in LAYOUTS
    for length, documents, shared in (
        (251, None, 1),
        (5, None, 2),
        (251, DOCUMENTS, 2),
        (251, DOCUMENTS, None),
        (256, (0, 64, 96, 128, 256), 1),
        (40, tuple(range(41)), 1),
    )
]
"""Layout, length, documents, and value heads of a key head; None is a gate per channel."""


def cases_of(world_size):
    """All cases of this many ranks, with every schedule; one rank has nothing to send."""
    teams = [(layout, 251, documents, 1) for layout in TEAMS for documents in (None, DOCUMENTS)]
    return [(*case, schedule) for schedule in SCHEDULES for case in CASES + teams * (world_size == 4)]


def documents_and_options(case):
    (_, options), length, documents, _, schedule = case
    return {"seq_len": length, "documents": documents, "delta_rule_schedule": schedule, **options}


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
def truth(length, documents, shared):
    def attend(*tensors):
        return delta_rule(*tensors, documents=documents, backend="reference")[0]

    return with_gradients(attend, inputs(length, shared))


def errors(got, want):
    """Errors relative to the norm; documents of one token give gates no gradient, so to 1 at least."""
    names = "out", "dq", "dk", "dv", "dg", "dbeta"
    return {name: ((a - b).norm() / b.norm().clamp(min=1)).item() for name, a, b in zip(names, got, want, strict=True)}


def attend_on_ranks(rank, world_size, cases, fault=None):
    """out, dq, dk, dv, dg and dbeta of the whole sequence for each case, and bytes that were sent."""
    if fault:
        fault()
    results = []
    for case in cases:
        (method, _), length, _, shared, _ = case
        cp = context_parallel(method, group=dist.group.WORLD, **documents_and_options(case))
        padding = (cp.positions >= length).nonzero().flatten()
        local = [cp.shard(x, dim=1) for x in inputs(length, shared)]
        local = [x.index_fill(1, padding, torch.nan) for x in local]  # what padding holds must reach nothing
        found = with_gradients(cp.attend_delta, local)
        results.append(([cp.unshard(x, 1) for x in found], cp.transport.traffic))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 6))])
def test_ranks_layouts_documents_and_schedules_are_exact_and_send_what_the_plan_says(world_size):
    cases = cases_of(world_size) if world_size > 1 else [(*case, "auto") for case in CASES]
    results = run_ranks(attend_on_ranks, world_size, cases)
    for index, case in enumerate(cases):
        (method, _), *asked, _ = case
        found = errors(results[0][index][0], truth(*asked))
        assert max(found.values()) <= 1e-12, (case, found)
        plan = make_plan(method, size=world_size, **documents_and_options(case))
        state, square = (BATCH * KEYS * (asked[2] or 1) * WIDTH * width * 8 for width in (VALUES, WIDTH))
        for rank, result in enumerate(results):
            ways = [delta_traffic(plan, rank, state, square, gradient=way) for way in (False, True)]
            assert result[index][1] == Traffic(ways[0].p2p + ways[1].p2p), case


def hard_inputs():
    """Gates of -100 on one token in eight, and keys that are all equal on every other head."""
    q, k, v, g, beta, dout = inputs(251, 1)
    g[:, ::8] = -100
    k[:, :, 0] = k[:1, :1, 0]
    return [q, k, v, g, beta / 2, dout]


def hard_on_ranks(rank, world_size):
    found = []
    for (method, options), schedule in product(LAYOUTS, SCHEDULES):
        cp = context_parallel(method, seq_len=251, group=dist.group.WORLD, delta_rule_schedule=schedule, **options)
        local = with_gradients(cp.attend_delta, [cp.shard(x, 1).float() for x in hard_inputs()])
        found.append([cp.unshard(x, 1).double() for x in local])
    return found


def test_float32_keeps_its_digits_under_strong_gates_and_equal_keys():
    want = with_gradients(lambda *x: delta_rule(*x, backend="reference")[0], hard_inputs())
    for got in run_ranks(hard_on_ranks, 4)[0]:
        assert max(errors(got, want).values()) <= 5e-6


def decay_alone():
    """M replaced by the decay of linear attention."""
    wide = delta.rule.wide_scan

    def without(q, k, v, g, beta, backend):
        out, reads, states = wide(q, k, v, g, beta, backend=backend)
        states[-1, ..., v.shape[-1] :] = torch.diag_embed(g.sum(1).exp()[..., None].expand(*states.shape[1:4]))
        return out, reads, states

    delta.rule.wide_scan = without


def documents_joined():
    """Documents that are not told apart."""
    scanned.gates_with_resets = lambda g, documents: g


def maps_out_of_order():
    """Maps composed as if the later came first."""

    def swapped(earlier, later, own=delta._composed):
        return own(earlier, later) if len(earlier) == 1 else own(later, earlier)

    delta._composed = swapped


@pytest.mark.parametrize(
    ("fault", "case", "schedules"),
    [
        (decay_alone, CASES[0], ("chain", "tree")),
        (documents_joined, CASES[2], ("chain", "tree")),
        (maps_out_of_order, CASES[6], ("tree",)),
    ],
)
def test_faults_show(fault, case, schedules):
    cases = [(*case, schedule) for schedule in schedules]
    for got, _ in run_ranks(attend_on_ranks, 3, cases, fault)[0]:
        assert max(errors(got, truth(*case[1:])).values()) > 1e-3


def test_who_has_which_segments():
    zigzag = segments(make_plan("zigzag", seq_len=16, size=2))
    assert [[(x.start, x.length, x.depth, x.left, x.before, x.after) for x in rank] for rank in zigzag] == [
        [(0, 4, 0, 2, None, 1), (12, 4, 2, 0, 1, None)],
        [(4, 8, 1, 1, 0, 0)],  # the two middle chunks touch
    ]
    plan = make_plan("ring", seq_len=29, size=4, documents=(0, 8, 12, 29), layout="contiguous")
    kinds = [[len(kind) for kind in scanned.parts(plan, rank)] for rank in range(4)]
    assert kinds == [[0, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]]  # 5 tokens of 8 do not wait


def heads_ahead(rank, world_size):
    """Heads of each scan that did not wait for its state."""
    found, wide_scan = [], delta.rule.wide_scan

    def counted(q, k, v, *others, **options):
        found.append(v.shape[2])
        return wide_scan(q, k, v, *others, **options)

    delta.rule.wide_scan = counted
    cp = context_parallel("ring", seq_len=251, group=dist.group.WORLD, layout="contiguous")
    cp.attend_delta(*(cp.shard(x, 1) for x in inputs(251, 2)[:5]))
    return found


def test_heads_take_their_turns_where_a_document_lies_on_two_ranks():
    assert run_ranks(heads_ahead, 2) == [[], [2]]  # a key head's two of four; the states of the others come meanwhile
    assert run_ranks(heads_ahead, 3) == [[], [4], [4]]


def test_calls_that_do_not_fit_are_named():
    tensors = inputs(16, 1)[:5]
    with pytest.raises(ContextError, match=r"each token is a segment.*use contiguous, zigzag or balanced"):
        segments(make_plan("striped", seq_len=16, size=2))
    cp = context_parallel("zigzag", seq_len=16)
    with pytest.raises(ContextError, match="does not fit a plan of 16 local positions"):
        cp.attend_delta(*(x[:, :8] for x in tensors))
    with pytest.raises(ContextError, match=r"attend_delta: .*beta"):
        cp.attend_delta(*tensors[:4], tensors[4][..., :1])


def test_masks_of_softmax_attention_are_refused():
    tensors = inputs(16, 1)[:5]
    for options, words in (({"window": (3, 0)}, r"window \(3, 0\)"), ({"causal": False}, "a full mask")):
        cp = context_parallel("ring", seq_len=16, **options)
        with pytest.raises(ContextError, match=f"a plan of {words}, and a state holds all tokens before"):
            cp.attend_delta(*tensors)


def test_it_compiles_whole():
    cp = context_parallel("zigzag", seq_len=16, documents=(0, 5, 16))
    attend = torch.compile(cp.attend_delta, fullgraph=True, backend="aot_eager")
    found, want = (with_gradients(function, inputs(16, 1)) for function in (attend, cp.attend_delta))
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def under_a_policy(rank, world_size, attention_kept):
    """dq, and bytes of a convolution and an attention in a layer whose activations are computed again."""
    cp = context_parallel("zigzag", seq_len=64, group=dist.group.WORLD)
    q, k, v, g, beta, dout = (cp.shard(x, 1) for x in inputs(64, 1))
    weight = torch.ones(KEYS * WIDTH, 4, dtype=torch.float64, requires_grad=True)

    def layer(x):
        return cp.attend_delta(cp.convolve(x.flatten(2), weight).view_as(x), k, v, g, beta)

    q.requires_grad_()
    out = layer(q) if attention_kept is None else recompute._recomputed(layer, attention_kept, None, q)
    out.backward(dout)
    return q.grad, cp.transport.traffic.total


def test_attention_boundary_sends_the_convolutions_rows_again_alone():
    results = [run_ranks(under_a_policy, 2, kept)[0] for kept in (None, True, False)]
    assert all(torch.equal(results[0][0], gradient) for gradient, _ in results)
    once, boundary, full = (count for _, count in results)
    rows = 3 * KEYS * WIDTH * BATCH * 8
    assert once + rows == boundary < full


def test_the_backward_outlives_the_object_that_attended():
    tensors = [x.requires_grad_() for x in inputs(16, 1)[:5]]
    context_parallel("zigzag", seq_len=16).attend_delta(*tensors).sum().backward()
    want = torch.autograd.grad(partial(delta_rule, backend="reference")(*tensors)[0].sum(), tensors[0])[0]
    torch.testing.assert_close(tensors[0].grad, want)
