"""Linear attention over exchanged heads, real gloo ranks against float64 in one process: out, every gradient, bytes."""

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernels import reference
from kernels.linear_attention import linear_attention
from parallel.context import ContextError, Traffic, context_parallel, make_plan
from testing.ranks import run_ranks
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
        make_plan("ulysses", seq_len=16, size=3).check_heads(HEADS, HEADS)
