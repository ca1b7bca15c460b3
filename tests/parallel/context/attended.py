"""Softmax attention of real ranks under any mask, against float64 and one process.

Its bytes are compared with the plan's.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from parallel.context import ContextParallel, Traffic, context_parallel
from parallel.context.layout import Window
from runtime.ranks import run_ranks

BATCH, LENGTH, HEAD_DIM = 2, 123, 32
CU_SEQLENS = (0, 7, 30, 31, 80, 123)
SINKS = (0.5, -1.5, 2.0, 0.0, 1.25, -3.0, 3.5, 1.0)
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 0.0}
"""Relative error of a norm that is always allowed."""
DSINKS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Relative error of dsinks, which torch's SDPA does not have.

Each rank rounds its own to the dtype.
"""


class Masked(NamedTuple):
    """The documents, mask and shape of an attention."""

    cu_seqlens: tuple[int, ...] | None = None
    window: Window | None = None
    causal: bool = True
    sinks: bool = False
    length: int = LENGTH
    heads: int = 8
    kv_heads: int = 2

    @property
    def whole(self):
        """Return whether it is one document without a window."""
        return self.cu_seqlens is None and self.window is None


PLAIN = Masked(length=251)
"""Padded on any number of ranks."""
NAMES = ("out", "dq", "dk", "dv", "dsinks")
Case = tuple[str, dict[str, Any], Masked, torch.dtype]
"""Method, its options, mask, dtype."""


def inputs(masked, dtype):
    """q, k, v and the gradient of out, the same on every rank.

    float64 values that ``dtype`` holds exactly.
    """
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(BATCH, masked.length, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
        .to(dtype)
        .double()
        for heads in (masked.heads, masked.kv_heads, masked.kv_heads, masked.heads)
    ]


def bias(masked):
    """0 where a query sees a key and -inf elsewhere, float64 [length, length]."""
    position = torch.arange(masked.length)
    document = torch.bucketize(
        position, torch.tensor((masked.cu_seqlens or (0, masked.length))[1:]), right=True
    )
    left, right = masked.window or (-1, -1)
    ahead = position - position[:, None]  # [query, key]
    visible_pairs = document[:, None] == document
    if masked.causal:
        visible_pairs &= ahead <= 0
    if left >= 0:
        visible_pairs &= ahead >= -left
    if right >= 0:
        visible_pairs &= ahead <= right
    return torch.zeros(visible_pairs.shape, dtype=torch.float64).masked_fill(
        ~visible_pairs, float("-inf")
    )


@cache
def truth(masked, dtype):
    """[out, dq, dk, dv, and dsinks if there are any] in float64.

    A sink is one more key, of value 0.
    """
    *leaves, dout = inputs(masked, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v = leaves
    k, v = (x.repeat_interleave(masked.heads // masked.kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * HEAD_DIM**-0.5 + bias(masked)
    if masked.sinks:
        sinks = torch.tensor(SINKS, dtype=torch.float64, requires_grad=True)
        leaves.append(sinks)
        scores = torch.cat(
            [scores, sinks[:, None, None].expand(BATCH, masked.heads, masked.length, 1)], -1
        )
    out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1)[..., : masked.length], v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@cache
def one_process_sdpa(masked, dtype):
    """[out, dq, dk, dv] of torch's SDPA with the same mask.

    A sink is one more key of score bias alone.
    """
    *leaves, dout = (x.to(dtype) for x in inputs(masked, dtype))
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    if masked.whole and not masked.sinks:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=masked.causal, enable_gqa=True)
    else:
        added = bias(masked).expand(1, masked.heads, -1, -1)
        if masked.sinks:
            sinks = torch.tensor(SINKS)[:, None, None].expand(1, masked.heads, masked.length, 1)
            added = torch.cat([added, sinks], -1)
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, added.to(dtype), enable_gqa=True)
    out = out.transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def error(got, want):
    """Relative error of each tensor in the 2-norm."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


def sinks_of(masked, dtype):
    """Sinks to attend with, if there are any: a leaf, [HEADS]."""
    return torch.tensor(SINKS, dtype=dtype, requires_grad=True) if masked.sinks else None


class Ranks:
    """Context parallelism of this rank by method and options.

    Groups are made once, whatever the length and mask.
    """

    def __init__(self):
        self._made: dict[tuple[Any, ...], dict[int, ContextParallel]] = {}

    def under(self, method, options, masked):
        """The context without documents and window, and the one under this mask.

        The first one's ``attend`` takes masks.
        """
        lengths = self._made.setdefault((method, tuple(options.items()), masked.causal), {})
        if not lengths:
            lengths[masked.length] = context_parallel(
                method,
                seq_len=masked.length,
                group=dist.group.WORLD,
                causal=masked.causal,
                **options,
            )
        elif masked.length not in lengths:
            lengths[masked.length] = next(iter(lengths.values())).over(masked.length)
        whole = lengths[masked.length]
        return whole, whole.under(documents=masked.cu_seqlens, window=masked.window)


def attended(ranks, method, options, masked, dtype):
    """Attend on this rank.

    Returns:
        out, dq, dk, dv (and dsinks) of the whole sequence; and whether the bytes sent to each rank
        are the plan's.
    """
    cp_plain, cp = ranks.under(method, options, masked)
    *leaves, dout = (cp.shard(x.to(dtype), dim=1) for x in inputs(masked, dtype))
    leaves = [x.requires_grad_() for x in leaves]
    sinks = sinks_of(masked, dtype)
    cp_plain.transport.traffic = Traffic()
    out = cp_plain.attend(*leaves, None if masked.whole else cp.handle, sinks=sinks)
    forward, cp_plain.transport.traffic = cp_plain.transport.traffic, Traffic()
    gradients = torch.autograd.grad(out, leaves if sinks is None else [*leaves, sinks], dout)
    sizes = {"heads": masked.heads, "kv_heads": masked.kv_heads, "element_size": out.element_size()}
    cost = cp.plan.cost(dist.get_rank(), batch=BATCH, head_dim=HEAD_DIM, **sizes)
    as_planned = (forward, cp_plain.transport.traffic) == (cost.forward, cost.backward)
    tensors = [cp.unshard(x, dim=1) for x in (out, *gradients[:3])]
    if sinks is not None:
        dsinks = gradients[3].double()  # of this rank's rows and heads
        dist.all_reduce(dsinks)
        tensors.append(dsinks)
    return tensors, as_planned


def attend_all(rank, world_size, cases):
    """The results of each case, on rank 0, and True where this rank sent what its plan says."""
    ranks, results = Ranks(), []
    for case in cases:
        tensors, as_planned = attended(ranks, *case)
        results.append((tensors if rank == 0 else [], as_planned))
    return results


def check(world_size, cases):
    """Compare all cases on real ranks.

    In float64 to its precision, in other dtypes by the error of one process.

    These errors are norms over thousands of elements, so that none is small by luck in bfloat16,
    whose rounding is the same on every processor. In float32 the kernels of processors differ, and
    ROUNDED is always allowed.
    """
    results = run_ranks(attend_all, world_size, cases)
    for index, case in enumerate(cases):
        assert all(result[index][1] for result in results), f"{case}: bytes sent are not the plan's"
        *_, masked, dtype = case
        want = truth(masked, dtype)
        for name, measured, limit in zip(
            NAMES, error(results[0][index][0], want), limits(masked, dtype), strict=False
        ):
            assert measured <= limit, f"{case}: {name} has {measured:.3g}, the limit is {limit:.3g}"


def limits(masked, dtype):
    """Largest errors of out, dq, dk, dv, and of dsinks."""
    if dtype == torch.float64:
        return [1e-12 if masked.sinks or masked.window else 1e-14] * len(NAMES)
    alone = error(one_process_sdpa(masked, dtype), truth(masked, dtype)[:4])
    return [*(max(1.5 * limit, ROUNDED[dtype]) for limit in alone), DSINKS[dtype]]
