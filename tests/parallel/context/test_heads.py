"""Exchanged heads on real gloo ranks: linear attention against float64 in one process; stages against none; bytes."""

import math
from functools import cache, partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernels import reference
from kernels.linear_attention import linear_attention
from parallel.context import ContextError, Traffic, context_parallel, heads, make_plan
from planner.recorder import Recorder
from planner.rehearsal import fake_process_group
from runtime.ranks import run_ranks
from tests.parallel.context.linear.test_state import LENGTHS, with_gradients
from tests.parallel.context.test_executor import error

BATCH, HEADS, WIDTH = 2, 8, 4
LOG_DECAY = tuple(math.log(decay) for decay in (1.0, 0.999, 0.99, 0.9, 0.7, 0.5, 0.3, 0.2))
Case = tuple[int, tuple[int, ...] | None, torch.dtype]
"""Length, documents, dtype."""
CASES: list[Case] = [(*length, dtype) for length in LENGTHS for dtype in (torch.float64, torch.float32)]


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, whose values are one wider, and the gradient of out; float64 values that ``dtype`` holds exactly."""
    generator = torch.Generator().manual_seed(11)
    widths = (WIDTH, WIDTH, WIDTH + 1, WIDTH + 1)
    return [
        torch.randn(BATCH, length, HEADS, wide, generator=generator, dtype=torch.float64).to(dtype).double()
        for wide in widths
    ]


@cache
def truth(length: int, documents: tuple[int, ...] | None, dtype: torch.dtype) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.linear_attention(q, k, v, LOG_DECAY, documents=documents)[0]

    return with_gradients(attend, inputs(length, dtype))


@cache
def one_process(length: int, documents: tuple[int, ...] | None, dtype: torch.dtype) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, LOG_DECAY, documents=documents, backend="chunked")[0]

    return with_gradients(attend, [x.to(dtype) for x in inputs(length, dtype)])


def attend_on_ranks(rank: int, world_size: int, cases: list[Case], rates: tuple[float, ...]) -> list[list[Tensor]]:
    """[out, dq, dk, dv] of the whole sequence for each case."""
    results = []
    for length, documents, dtype in cases:
        cp = context_parallel("ulysses", seq_len=length, group=dist.group.WORLD, documents=documents)
        local = [cp.shard(x.to(dtype), dim=1) for x in inputs(length, dtype)]
        # What padding holds must reach nothing.
        local = [x.index_fill(1, (cp.positions >= length).nonzero().flatten(), 1e3) for x in local]
        found = with_gradients(partial(cp.attend_linear, log_decay=rates), local)
        results.append([cp.unshard(x, 1) for x in found])
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_and_documents_are_exact(world_size: int) -> None:
    for case, got in zip(CASES, run_ranks(attend_on_ranks, world_size, CASES, LOG_DECAY)[0], strict=True):
        want = truth(*case)
        limits = [1e-12] * 4
        if case[-1] == torch.float32:
            limits = [max(1.2 * one, 1e-5) for one in error(one_process(*case), want)]
        for name, measured, limit in zip(("out", "dq", "dk", "dv"), error(got, want), limits, strict=True):
            assert measured <= limit, f"{case}: {name} has {measured:.3g}, the limit is {limit:.3g}"


def test_the_decays_of_other_heads_would_be_seen() -> None:
    case: Case = (251, None, torch.float64)
    rates = LOG_DECAY[:4] * 2  # what both of 2 ranks would have if neither took its own
    (got,) = run_ranks(attend_on_ranks, 2, [case], rates)[0]
    assert min(error(got, truth(*case))) > 1e-3


def count_bytes(rank: int, world_size: int, lengths: list[int]) -> list[tuple[Traffic, Traffic, Any]]:
    """Bytes sent forward and backward, and the plan's."""
    found = []
    for length in lengths:
        cp = context_parallel("ulysses", seq_len=length, group=dist.group.WORLD)
        widths = (2 * WIDTH, 2 * WIDTH, WIDTH)  # as LRPE makes them
        leaves = [torch.ones(BATCH, cp.plan.local_len, HEADS, wide, requires_grad=True) for wide in widths]
        out = cp.attend_linear(*leaves, LOG_DECAY)
        forward, cp.transport.traffic = cp.transport.traffic, Traffic()
        out.sum().backward()
        sizes = {"batch": BATCH, "heads": HEADS, "kv_heads": HEADS, "element_size": 4, "head_dim": 2 * WIDTH}
        found.append((forward, cp.transport.traffic, cp.plan.cost(rank, **sizes, value_dim=WIDTH)))
    return found


def test_bytes_are_the_plans_and_grow_with_the_length() -> None:
    """Of B N d / P elements of v and of out, and twice as many of q and of k, a rank keeps its own 1 / P."""
    ranks, lengths = 4, [64, 128, 256, 512]
    for rank, found in enumerate(run_ranks(count_bytes, ranks, lengths)):
        for length, (forward, backward, cost) in zip(lengths, found, strict=True):
            each = 4 * 6 * BATCH * length * HEADS * WIDTH // ranks // ranks
            assert forward == backward == Traffic(collective={peer: each for peer in range(ranks) if peer != rank})
            assert (forward, backward) == (cost.forward, cost.backward)


def test_heads_that_the_ranks_cannot_split_are_refused() -> None:
    with pytest.raises(ContextError, match=r"ulysses_degree is 3 with 8 query and 8 key heads.*must divide"):
        make_plan("ulysses", seq_len=16, size=3).geometry.check_heads(HEADS, HEADS)


STAGES: dict[int, list[tuple[str, dict[str, Any], int, int, int]]] = {  # method, options, heads, KV heads, stages
    2: [("ulysses", {}, 8, 8, 2), ("ulysses", {}, 8, 8, 4), ("ulysses", {"window": (31, 0)}, 8, 4, 2)],
    4: [
        ("ulysses", {}, 8, 2, 2),  # fewer KV heads than ranks
        ("ulysses", {"causal": False}, 24, 8, 6),
        ("zigzag", {"ulysses_degree": 2}, 8, 8, 4),
        ("allgather", {"ulysses_degree": 2}, 16, 4, 8),
        ("exchange", {"ulysses_degree": 2, "documents": (0, 96, 128, 256)}, 8, 4, 2),
        ("zigzag", {"ulysses_degree": 2, "documents": (0, 96, 128, 256)}, 8, 2, 4),
    ],
    8: [
        ("wallfacer", {"ulysses_degree": 2, "team_size": 2}, 8, 8, 4),
        ("double_ring", {"ulysses_degree": 2, "ranks_per_node": 4}, 16, 8, 4),
    ],
}


def in_stages(rank: int, world_size: int, dtype: torch.dtype, *, wrong: bool = False) -> list[list[list[Tensor]]]:
    """[out, dq, dk, dv, dsinks] of each case, without stages and in stages; what is sent is what the plan says."""
    if wrong:  # every stage attends with its rank's first heads
        heads._Heads._view = lambda self, x: x.unflatten(2, self.split).select(5, 0).select(3, 0)
    found: list[list[list[Tensor]]] = []
    for method, options, count, kv_count, stages in STAGES[world_size]:
        generator = torch.Generator().manual_seed(5)
        counts = (count, kv_count, kv_count, count)
        whole = [torch.randn(BATCH, 256, n, 16, generator=generator, dtype=torch.float64).to(dtype) for n in counts]
        sinks = torch.randn(count, generator=generator)
        found.append([])
        for chunks in (1, stages):
            options = options | {"ulysses_head_chunks": chunks}
            cp = context_parallel(method, seq_len=256, group=dist.group.WORLD, **options)
            q, k, v, dout = (cp.shard(x, 1) for x in whole)
            # A sink's logarithm of a single head is another one in its last bit: no sinks to compare with there.
            sinks_of = sinks if count > cp.plan.geometry.ulysses_degree * stages else None
            leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not sinks or sinks_of is not None]
            out = cp.attend(*leaves[:3], sinks=None if sinks_of is None else leaves[3])
            sent, cp.transport.traffic = cp.transport.traffic, Traffic()
            gradients = list(torch.autograd.grad(out, leaves, dout))
            sizes = {"batch": BATCH, "heads": count, "kv_heads": kv_count, "head_dim": 16}
            cost = cp.plan.cost(rank, **sizes, element_size=dtype.itemsize)
            assert (sent, cp.transport.traffic) == (cost.forward, cost.backward), (method, options)
            if sinks_of is not None:
                dist.all_reduce(gradients[3])
            found[-1].append([cp.unshard(x, 1) for x in (out.detach(), *gradients[:3])] + gradients[3:])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_stages_change_no_bit(world_size: int, dtype: torch.dtype) -> None:
    """If the query heads of a KV head are in several stages, sums over them have another order: dk, dv, in a ring dq.

    All tiles here have multiples of 16 rows: of others a CPU merges the last rows, and which these are depends on the
    heads, by instructions that round otherwise.
    """
    for case, (want, got) in zip(STAGES[world_size], run_ranks(in_stages, world_size, dtype)[0], strict=True):
        _, options, _, kv_count, stages = case
        ranks = options.get("ulysses_degree", world_size)
        same = 4 if max(1, kv_count // ranks) % stages == 0 else 2 if ranks == world_size else 1
        assert all(torch.equal(a, b) for a, b in zip(got[:same], want[:same], strict=True)), case
        limit = 1e-6 if dtype == torch.float32 else 1e-3
        assert all(x <= limit for x in error(got[same:], [x.double() for x in want[same:]])), case


def test_stages_of_wrong_heads_would_be_seen() -> None:
    wrong = run_ranks(partial(in_stages, wrong=True), 2, torch.float32)[0]
    assert not any(torch.equal(got[0], want[0]) for want, got in wrong)


def counted(stages: int, kv_heads: int) -> tuple[int, int, int]:
    """Bytes beyond q, k and v of a rank of 8 with 64 query heads: a forward's peak, what it keeps, a backward's peak.

    In units of a rank's tokens of one head in bfloat16.
    """
    with fake_process_group(0, 8, 8):
        cp = context_parallel("ulysses", seq_len=1024, group=dist.group.WORLD, ulysses_head_chunks=stages)
        recorder = Recorder(0, 8)
        with recorder.recording():
            leaves = [
                torch.empty(1, 128, n, WIDTH, dtype=torch.bfloat16, requires_grad=True)
                for n in (64, kv_heads, kv_heads)
            ]
            dout, begun = torch.empty_like(leaves[0]), len(recorder.events)
            out = cp.attend(*leaves)
            turned = len(recorder.events)
            _gradients = torch.autograd.grad(out, leaves, dout)
            live = [0, *accumulate(change for _, change in recorder.events)]
    unit = 128 * WIDTH * 2
    peaks = max(live[begun : turned + 1]), live[turned], max(live[turned:])
    return tuple((peak - live[begun]) // unit for peak in peaks)  # type: ignore[return-value]


@pytest.mark.parametrize("kv_heads", [64, 8])
def test_exchanged_heads_take_a_stages_memory(kv_heads: int) -> None:
    """UPipe's formula: of 64 heads on 8 ranks in 8 stages, 87.5 % less; what is not exchanged stays as it is.

    With 8 KV heads all stages share the one that a rank has, exchanged once.
    """
    own = 64 + 64 * 4 // (2 * WIDTH)  # the local out, and lse in float32
    whole, kept, _ = counted(1, kv_heads)
    assert kept == 64 + own + 2 * kv_heads + 64  # with q, k, v and out exchanged
    found = {stages: counted(stages, kv_heads) for stages in (2, 4, 8)}
    for stages, (peak, kept, backward) in found.items():
        queries, keys = 64 // stages, max(8, kv_heads // stages)
        assert kept == own
        # q, k, v, out and lse; copies under way
        assert own + 3.5 * queries + 2 * keys <= peak <= own + 4 * queries + 2 * keys
        gradients = 64 + 2 * kv_heads + 32  # with that of lse
        assert backward <= own + gradients + 640 // stages + 4 * 8  # 10 of each head in a stage, and shared dk, dv
    assert 4 * 8 + 2 * 8 == (4 * 64 + 2 * 64) * (1 - 0.875)
    assert whole > found[2][0]
