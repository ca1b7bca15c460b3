"""Ranks as threads: every method against float64, and what happens where one fails."""

from itertools import product

import pytest
import torch

from kernels import reference
from kernels.backends.base import AttentionKernel
from parallel.context import METHODS, executor, make_plan
from parallel.context.executor import Executor
from tests import threads
from tests.compositions import with_options
from tests.parallel.context.attended import CU_SEQLENS, Masked, error, inputs, truth

CASES = [
    (method, {}, masked) for method in METHODS for masked in (Masked(), Masked(CU_SEQLENS, (9, 0)))
]
CASES += [(method, options, Masked(CU_SEQLENS)) for method, options in with_options(4)]


def as_on_a_gpu(x, like):
    """The result of a kernel that computes heads first, in the dtype of its inputs."""
    return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def forward(q, k, v, causal, scale):
    out, lse = reference.block_forward(q, k, v, causal, scale)
    return as_on_a_gpu(out, q), as_on_a_gpu(lse, lse)


def backward(rows, keys, causal, scale):
    return tuple(
        as_on_a_gpu(x, rows.q) for x in reference.block_backward(rows, keys, causal, scale)
    )


@pytest.fixture
def block_by_block(monkeypatch):
    """A kernel that takes one block, as those of a GPU; the CPU's takes lists of tiles.

    What a forward returns is in the order of its dimensions all the same; gradients are once an
    operator returns them.
    """
    monkeypatch.setattr(
        executor, "select_backend", lambda *_: AttentionKernel("", forward, backward)
    )
    monkeypatch.setattr(Executor, "forward", in_order(Executor.forward))


def in_order(plain):
    def checked(self, plan, *args):
        outputs = plain(self, plan, *args)
        assert all(x.is_contiguous() for x in outputs)
        assert {x.dtype for x in outputs} <= {args[0].dtype, torch.float32}
        return outputs

    return checked


@pytest.mark.parametrize("moves", ["kv", "queries"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 3.1e-3)])
def test_blocks_add_up_whatever_their_kernel_returns(dtype, bound, moves, block_by_block):
    """In bfloat16 each block is rounded once, 3.0e-3.

    With sums that travel in it, as a rank alone may, 3.4e-3.
    """
    for (method, options, masked), size in product(CASES, (1, 4)):
        if size == 1 and options:
            continue
        mask = {"documents": masked.cu_seqlens, "window": masked.window}
        plan = make_plan(
            method, seq_len=masked.length, size=size, backward=moves, **mask, **options
        )
        outputs = threads.attend(plan, [x.to(dtype) for x in inputs(masked, dtype)])
        limit = (
            1.1 * bound if method == "ulysses" else bound
        )  # whose ranks send each other's part of a KV head
        assert max(error(outputs, truth(masked, dtype))) < limit, (method, options, masked, size)


def test_a_message_that_is_changed_is_seen(monkeypatch):
    plain = threads.ThreadTransport._send
    monkeypatch.setattr(
        threads.ThreadTransport,
        "_send",
        lambda self, tensors, *rest: plain(
            self, [x.roll(1, 1) for x in tensors] if self.rank == 2 else tensors, *rest
        ),
    )
    outputs = threads.attend(
        make_plan("zigzag", seq_len=123, size=4), inputs(Masked(), torch.float64)
    )
    assert min(error(outputs, truth(Masked(), torch.float64))) > 1e-3


def test_a_rank_that_fails_or_says_nothing_ends_all(monkeypatch):
    plan, plain = make_plan("ring", seq_len=123, size=4), threads.ThreadTransport._send

    def failing(self, *args):
        if self.rank == 1:
            raise ValueError("no link")
        plain(self, *args)

    monkeypatch.setattr(threads.ThreadTransport, "_send", failing)
    with pytest.raises(ValueError, match="no link"):
        threads.attend(plan, inputs(Masked(), torch.float64))
    monkeypatch.setattr(threads, "PATIENCE", 0.3)
    monkeypatch.setattr(threads.ThreadTransport, "_send", lambda *args: None)
    with pytest.raises(TimeoutError, match=r"rank \d (waited for message 0 of rank|stops)"):
        threads.attend(plan, inputs(Masked(), torch.float64))
