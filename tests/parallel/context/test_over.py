"""Contexts of other lengths over the same groups, with a scale of one's own.

Outputs and gradients in float64.
"""

import torch
import torch.distributed as dist

from kernels.ops import delta_rule
from parallel.context import METHODS, context_parallel
from runtime.ranks import run_ranks

LENGTH, CU_SEQLENS, SCALE = 37, (0, 5, 29, 37), 0.7


def draw(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def attended(attend, leaves, dout):
    """Outputs and gradients; leaves are q, k, v of four heads."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def naive(scale):
    """Attention within documents [1, LENGTH, 4, 8]."""
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor(CU_SEQLENS[1:]), right=True)
    hidden = ~((document[:, None] == document) & torch.ones(LENGTH, LENGTH).tril().bool())

    def attend(q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
        return torch.einsum(
            "bhts,bshd->bthd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v
        )

    return attend


def error(actual, truth):
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, truth, strict=True)
    )


def over(rank, world_size):
    """Errors by method, of attention and of the delta rule, and of a control with another scale."""
    *leaves, dout = draw(4, 1, LENGTH, 4, 8)
    truth, control = (attended(naive(scale), leaves, dout) for scale in (SCALE, 8**-0.5))
    errors_by_method = {}
    for method in METHODS:
        first = context_parallel(method, seq_len=world_size, group=dist.group.WORLD)
        cp = first.over(LENGTH, documents=CU_SEQLENS)
        assert cp.transport._far is first.transport._far
        assert cp.transport._groups is first.transport._groups
        assert first.over(LENGTH).plan is first.over(LENGTH).plan
        mine = attended(
            lambda q, k, v, cp=cp: cp.attend(q, k, v, scale=SCALE),
            [cp.shard(x, 1) for x in leaves],
            cp.shard(dout, 1),
        )
        whole = [cp.unshard(x, 1) for x in mine]
        errors_by_method[method] = error(whole, truth), error(whole, control)
    cp = context_parallel("zigzag", seq_len=2, group=dist.group.WORLD).over(
        LENGTH, documents=CU_SEQLENS
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in leaves[:2])
    operands = q, k, leaves[2], -leaves[0][..., 0].abs(), leaves[1][..., 0].sigmoid()
    out = cp.attend_delta(*(cp.shard(x, 1) for x in operands))
    errors_by_method["delta"] = (
        error([cp.unshard(out, 1)], [delta_rule(*operands, cu_seqlens=CU_SEQLENS)[0]]),
        1,
    )
    return errors_by_method


def test_a_context_of_another_length_attends_as_one_process():
    for errors_by_method in run_ranks(over, 2):
        assert {
            name: errors
            for name, errors in errors_by_method.items()
            if not errors[0] < 1e-12 < 1e-2 < errors[1]
        } == {}
