"""Summed cross entropy of next-token prediction, with little memory beyond the logits.

Shapes: N tokens, V vocabulary entries.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of the float32 copy alive at a time: 4 MiB fit a CPU's cache, 128 MiB keep a GPU busy.
LOSS_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}

Split = tuple[int, dist.ProcessGroup]
"""The first of this rank's vocabulary entries, and the ranks that have the others."""


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, split: Split | None = None
) -> tuple[Tensor, Tensor]:
    """Sum -log softmax(logits)[label] over tokens, and count the tokens.

    Computed in float32 (float64 for float64 logits), a chunk of rows at a time: between forward and backward only the
    logits themselves are kept at their size.

    Args:
        logits: ``[..., V]``, any floating dtype.
        labels: ``[...]``, integers in [0, V), or ignore_index for a token without loss and gradient.
        split: given if these logits are of some entries only; collective then, with the same labels on all ranks.

    Returns:
        loss_sum, a float32 (float64) scalar, differentiable once, and valid_count, an int64 scalar.

    Raises:
        ValueError: the shapes do not match. A label out of range is an IndexError on the CPU and a device-side
            assertion on CUDA.
    """
    if logits.shape[:-1] != labels.shape:
        shapes = tuple(labels.shape), tuple(logits.shape[:-1])
        raise ValueError(f"labels {shapes[0]} and logits {shapes[1]} x V must agree in all but V")
    loss = _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten(), ignore_index, split)
    return loss, (labels != ignore_index).sum()


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of logits [N, V], to be processed in float32 one at a time."""
    rows = max(1, LOSS_CHUNK[logits.device.type] // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, split: Split | None) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        first, group = split or (0, None)
        valid = labels != ignore_index  # [N]
        here = valid if split is None else valid & (labels >= first) & (labels < first + logits.shape[1])
        column = (labels - first).where(here, 0)
        lse = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        for rows in _row_chunks(logits):
            torch.logsumexp(logits[rows].to(dtype), dim=-1, out=lse[rows])
        chosen = logits.gather(-1, column[:, None])[:, 0].to(dtype)
        if split is not None:  # so far of these entries alone
            largest = lse.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            sums = torch.stack(((lse - largest).exp(), chosen.where(here, 0)))  # [2, N]: one message for both
            dist.all_reduce(sums, group=group)
            lse, chosen = largest + sums[0].log(), sums[1]
        ctx.save_for_backward(logits, column, here, valid, lse)
        return (lse - chosen).where(valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, here, valid, lse = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            if grad.dtype == lse.dtype:  # in place
                chunk = torch.sub(logits[rows], lse[rows, None], out=grad[rows])
            else:
                chunk = logits[rows].to(lse.dtype, copy=True).sub_(lse[rows, None])
            chunk.exp_().scatter_add_(-1, column[rows, None], -here[rows, None].to(chunk.dtype))
            chunk.mul_(grad_loss).masked_fill_(~valid[rows, None], 0)
            if chunk.dtype != grad.dtype:
                grad[rows] = chunk
        return grad, None, None, None
