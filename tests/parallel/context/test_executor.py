"""Attention over real gloo ranks against float64 in one process: out and every gradient."""

import pytest
import torch
import torch.distributed as dist

from kernels import reference
from parallel.context import METHODS, ContextError, context_parallel
from runtime.ranks import run_ranks
from tests.parallel.context.attended import Masked, Ranks, attended, check, error, truth

BASIC = ("ring", "striped", "zigzag", "allgather")
SHAPES = [Masked(length=256, kv_heads=8), Masked(length=251), Masked(length=1201, heads=2, kv_heads=1)]
"""Equal heads; shared ones and an odd length; blocks cut for the kernel."""


@pytest.mark.parametrize("world_size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_error_does_not_grow_with_the_number_of_ranks(world_size):
    cases = [
        (method, {}, shape._replace(causal=causal), dtype)
        for method in BASIC
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for causal in (True, False)
        if causal or shape.length < 1000
    ]
    check(world_size, cases)


def test_float64_is_exact_to_its_own_precision():
    masks = [shape._replace(causal=causal) for shape in SHAPES for causal in (True, False)]
    check(3, [(method, {}, mask, torch.float64) for method in BASIC for mask in masks], exact=1e-14)


def attend_without_the_shift(rank, world_size):
    """Striping with the diagonal kept where it must be excluded."""
    from kernels.attention import CAUSAL, FULL
    from parallel.context import tiles

    def compare(rows, columns, shift, q0, k0):
        return [(q0, q0 + rows, k0, k0 + columns, CAUSAL if shift < columns else FULL)]

    tiles._compare = compare
    return attended(Ranks(), "striped", {}, SHAPES[0], torch.float64)[0]


def test_dropping_the_shift_of_the_striped_mask_is_noticed():
    assert max(error(run_ranks(attend_without_the_shift, 2)[0], truth(SHAPES[0], torch.float64))) > 1e-3


def shard_and_unshard(rank, world_size):
    x = torch.arange(2 * 13 * 3).reshape(2, 13, 3)
    return all(
        torch.equal(cp.unshard(cp.shard(x, dim=1, pad_value=-1), dim=1), x)
        and bool((cp.shard(x, dim=1, pad_value=-1)[:, cp.positions >= 13] == -1).all())
        for cp in (context_parallel(method, seq_len=13, group=dist.group.WORLD) for method in METHODS)
    )


def test_unshard_undoes_shard_and_padding_is_marked():
    assert all(run_ranks(shard_and_unshard, 4))


def padding_rows_reach_nothing(rank, world_size):
    """Difference that gradients on the rows of padding make to dk and dv."""
    found = []
    for method in METHODS:
        for causal in (True, False):
            cp = context_parallel(method, seq_len=5, group=dist.group.WORLD, causal=causal)
            q, k, v = (torch.randn(1, cp.plan.local_len, 4, 8, requires_grad=True) for _ in range(3))
            dout = torch.zeros_like(q)
            dout[:, cp.positions >= 5] = 1
            gradients = torch.autograd.grad(cp.attend(q, k, v), (k, v), dout)
            found += [g[:, cp.positions < 5].abs().sum().item() for g in gradients]
    return found


def test_padding_sees_and_changes_nothing_of_the_sequence():
    for found in run_ranks(padding_rows_reach_nothing, 4):
        assert found == [0.0] * len(found)


def test_shapes_that_do_not_fit_are_named():
    cp = context_parallel("zigzag", seq_len=16)
    q = torch.randn(1, 16, 4, 8)
    with pytest.raises(ContextError, match="dimension 1 has 12 positions and the plan was made for 16"):
        cp.shard(q[:, :12], dim=1)
    with pytest.raises(ContextError, match="do not fit a plan of 16 local positions"):
        cp.attend(q[:, :8], q[:, :8], q[:, :8])
    with pytest.raises(ContextError, match="multiple of the key heads"):
        cp.attend(q, q[:, :, :3], q[:, :, :3])


def test_the_backward_outlives_the_object_that_attended():
    q = torch.randn(1, 16, 2, 8, requires_grad=True)
    context_parallel("striped", seq_len=16).attend(q, q, q).sum().backward()  # .sum(): a gradient with strides of 0
    want = torch.autograd.grad(reference.attention(q, q, q, causal=True)[0].sum(), q)[0]
    torch.testing.assert_close(q.grad, want)


def test_the_attention_is_one_operator_that_autograd_and_tracing_accept():
    cp = context_parallel("striped", seq_len=16)
    q, k, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    handles = cp._executor.handle, cp.handle.tensor
    for last in ((None, 0.3, *handles, [], None), (sinks, 0.3, *handles, [3, 0], None)):
        torch.library.opcheck(torch.ops.longmesh.context_attention.default, (q, k, v, *last))
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.longmesh.context_attention.default, (*strided, None, 0.3, *handles, [], None))
