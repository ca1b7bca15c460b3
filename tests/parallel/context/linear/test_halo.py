"""The short convolution over real gloo ranks against one process, in float64."""

import pytest
import torch
import torch.distributed as dist

from kernels.ops import causal_convolution
from parallel.context import ContextError, Traffic, context_parallel, make_plan
from parallel.context.linear import halo
from parallel.context.linear.halo import halo_traffic, halos
from parallel.context.sparse.rows import as_columns, rows_seen
from runtime.ranks import run_ranks
from tests.compositions import CONSECUTIVE
from tests.parallel.context.linear.cases import CU_SEQLENS, with_gradients

BATCH, CHANNELS, TAPS = 2, 3, 4
LENGTHS = [
    (251, None),
    (5, None),  # pieces shorter than the halo, ranks of padding alone
    (251, CU_SEQLENS),
    (40, tuple(range(41))),
]
CASES = [(layout, *rest) for layout in CONSECUTIVE for rest in LENGTHS]


def inputs(length):
    """x, weight and the gradient of out, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shapes = (BATCH, length, CHANNELS), (CHANNELS, TAPS), (BATCH, length, CHANNELS)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def convolve_on_ranks(rank, world_size, cases, fault=None):
    """out, dx and dweight of the whole sequence for each case, and bytes that were sent."""
    if fault:
        fault()
    results = []
    for (method, options), length, cu_seqlens in cases:
        cp = context_parallel(
            method, seq_len=length, group=dist.group.WORLD, documents=cu_seqlens, **options
        )
        x, weight, dout = inputs(length)
        padding = (cp.positions >= length).nonzero().flatten()
        local = [cp.shard(y, dim=1).index_fill(1, padding, torch.nan) for y in (x, dout)]
        out, dx, dweight = with_gradients(cp.convolve, [local[0], weight, local[1]])
        dist.all_reduce(dweight)
        assert not out[:, padding].any()
        assert not dx[:, padding].any()
        results.append(([cp.unshard(out, 1), cp.unshard(dx, 1), dweight], cp.transport.traffic))
    return results


def worst(got, length, cu_seqlens):
    want = with_gradients(
        lambda x, weight: causal_convolution(x, weight, cu_seqlens=cu_seqlens), inputs(length)
    )
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_ranks_are_exact_and_send_what_the_plan_says(world_size):
    results = run_ranks(convolve_on_ranks, world_size, CASES)
    for index, (layout, length, cu_seqlens) in enumerate(CASES):
        got, _ = results[0][index]
        assert worst(got, length, cu_seqlens) <= 1e-14, (layout, length, cu_seqlens)
        plan = make_plan(
            layout[0], seq_len=length, size=world_size, documents=cu_seqlens, **layout[1]
        )
        for rank, result in enumerate(results):
            ways = [
                halo_traffic(plan, rank, TAPS, BATCH * CHANNELS * 8, gradient=way)
                for way in (False, True)
            ]
            assert result[index][1] == Traffic(ways[0].p2p + ways[1].p2p)


def no_halo():
    """Segments that begin with zeros."""
    halo.cut = lambda plan: ()


def across_documents():
    """Rows before a document's first token."""
    cut = halo.cut

    def joined(plan):
        return cut(plan.under(cu_seqlens=None, window=None))

    halo.cut = joined
    halo.segments = lambda plan, segments=halo.segments: segments(
        plan.under(cu_seqlens=None, window=None)
    )


@pytest.mark.parametrize(("fault", "case"), [(no_halo, CASES[0]), (across_documents, CASES[2])])
def test_faults_show(fault, case):
    got, _ = run_ranks(convolve_on_ranks, 3, [case], fault)[0][0]
    assert worst(got, *case[1:]) > 1e-3


@pytest.mark.parametrize(("layout", "length", "cu_seqlens"), CASES)
def test_rows_are_those_that_a_window_would_see(layout, length, cu_seqlens):
    plan = make_plan(layout[0], seq_len=length, size=4, documents=cu_seqlens, **layout[1])
    pieces = as_columns([plan.real_pieces((rank,)) for rank in range(4)])
    seen_rows = rows_seen(pieces, pieces, 1, (TAPS - 1, 0))
    want = {
        (who, whose, row)
        for who, whose, first, end in zip(*(x.tolist() for x in seen_rows), strict=True)
        for row in range(first, end)
        if who != whose
    }
    sends = [
        (part.peer, rank, part.rows)
        for rank, rank_halo in enumerate(halos(plan, TAPS - 1))
        for part in rank_halo.sends
    ]
    rows_by_rank = {
        (who, whose, row)
        for who, whose, rows in sends
        for row in range(rows.start, rows.stop)
        if who != whose
    }
    assert rows_by_rank == want


def test_sums_of_bfloat16_are_the_bits_of_one_process():
    tensors = [y.bfloat16() for y in inputs(64)]
    actual = with_gradients(context_parallel("zigzag", seq_len=64).convolve, tensors)
    for got, want in zip(actual, with_gradients(causal_convolution, tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def half_gradient(rank, world_size, length, cu_seqlens):
    """dx [B, T, C] in bfloat16."""
    cp = context_parallel("zigzag", seq_len=length, group=dist.group.WORLD, documents=cu_seqlens)
    x, weight, dout = (y.bfloat16() for y in inputs(length))
    return cp.unshard(
        with_gradients(cp.convolve, [cp.shard(x, 1), weight, cp.shard(dout, 1)])[1], 1
    )


@pytest.mark.parametrize(("length", "cu_seqlens"), [(64, None), (5, None), (40, (0, 3, 9, 40))])
def test_a_gradient_of_several_ranks_is_rounded_once(length, cu_seqlens):
    """Pieces shorter than the halo have rows that several read."""
    exact = [y.bfloat16().double() for y in inputs(length)]
    want = with_gradients(
        lambda x, weight: causal_convolution(x, weight, cu_seqlens=cu_seqlens), exact
    )[1]
    for got in run_ranks(half_gradient, 3, length, cu_seqlens):
        assert ((got.double() - want).abs() <= (want.bfloat16().double() - want).abs() + 1e-6).all()


def test_it_compiles_whole():
    cp = context_parallel("zigzag", seq_len=16, documents=(0, 5, 16))
    compiled = torch.compile(cp.convolve, fullgraph=True, backend="aot_eager")
    actual, want = (with_gradients(convolve, inputs(16)) for convolve in (compiled, cp.convolve))
    torch.testing.assert_close(actual, want, rtol=0, atol=0)


def test_calls_that_do_not_fit_are_named():
    x, weight, _ = inputs(16)
    cp = context_parallel("zigzag", seq_len=16)
    with pytest.raises(
        ContextError, match=r"convolve: x .* does not fit a plan of 16 local positions"
    ):
        cp.convolve(x[:, :8], weight)
    with pytest.raises(ContextError, match=r"convolve: .*weight"):
        cp.convolve(x, weight[:2])
    with pytest.raises(ContextError, match="the plan has a full mask"):
        context_parallel("ring", seq_len=16, causal=False).convolve(x, weight)
