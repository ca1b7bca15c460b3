"""Summed cross entropy of next-token prediction, with little memory beyond the logits.

Shapes: N tokens, V vocabulary entries.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of the float32 copy alive at a time: 4 MiB fit a CPU's cache, 128 MiB keep a GPU busy.
LOSS_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Sum -log softmax(logits)[label] over tokens, and count the tokens.

    Computed in float32 (float64 for float64 logits), a chunk of rows at a time: between forward and backward only the
    logits themselves are kept at their size.

    Args:
        logits: ``[..., V]``, any floating dtype.
        labels: ``[...]``, integers in [0, V), or ignore_index for a token without loss and gradient.

    Returns:
        loss_sum, a float32 (float64) scalar, differentiable once, and valid_count, an int64 scalar.

    Raises:
        ValueError: the shapes do not match. A label out of range is an IndexError on the CPU and a device-side
            assertion on CUDA.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels {tuple(labels.shape)} and logits {tuple(logits.shape)} must agree in all but V")
    loss = _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten(), ignore_index)
    return loss, (labels != ignore_index).sum()


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of logits [N, V], to be processed in float32 one at a time."""
    rows = max(1, LOSS_CHUNK[logits.device.type] // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def softmax_rows(logits: Tensor, lse: Tensor, rows: slice, into: Tensor) -> Tensor:
    """Return the softmax of some rows of logits [N, V] in the dtype of lse [N]; in ``into`` if it has that dtype."""
    if into.dtype == logits.dtype == lse.dtype:
        return torch.sub(logits[rows], lse[rows, None], out=into[rows]).exp_()
    return logits[rows].to(lse.dtype, copy=True).sub_(lse[rows, None]).exp_()


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        valid = labels != ignore_index  # [N]
        labels = labels.where(valid, 0)
        lse = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        for rows in row_chunks(logits):
            torch.logsumexp(logits[rows].to(dtype), dim=-1, out=lse[rows])
        chosen = logits.gather(-1, labels[:, None])[:, 0].to(dtype)
        ctx.save_for_backward(logits, labels, valid, lse)
        return (lse - chosen).where(valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, valid, lse = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in row_chunks(logits):
            chunk = softmax_rows(logits, lse, rows, grad)
            chunk.scatter_add_(-1, labels[rows, None], chunk.new_full((1, 1), -1.0).expand(len(chunk), 1))
            chunk.mul_(grad_loss).masked_fill_(~valid[rows, None], 0)
            if chunk.dtype != grad.dtype:
                grad[rows] = chunk
        return grad, None, None
