"""Summed cross entropy, and functions of rows that are applied in chunks to save memory.

The logits are the largest tensor of a small model: N tokens times V entries, and a naive loss holds
several float32 copies. Here the float32 copy exists for one chunk of rows at a time. A chunked
function of rows (``over_chunks``) goes further: the logits themselves exist for one chunk only.

Shapes: N rows (tokens), C their width, V vocabulary entries.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from runtime.simulation import device_type_of
from runtime.tensors import accum_dtype

LOSS_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Number of elements in a float32 chunk: 4 MiB fit a CPU's cache, and 128 MiB keep a GPU busy."""

Split = tuple[int, dist.ProcessGroup]
"""First vocabulary entry of this rank, and the group of ranks that share the vocabulary."""
RowFunction = Callable[[Tensor, slice], Tensor]
"""Function of (rows [n, C], their slice) that returns [n, ...], or a scalar to be summed."""


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, split: Split | None = None
) -> tuple[Tensor, Tensor]:
    """Sum -log softmax(logits)[label] over tokens, and count the tokens.

    Computed in float32 (float64 for float64 logits), a chunk of rows at a time. Between forward and
    backward the logits are the only tensor of their size in memory.

    Args:
        logits: ``[..., V]``, any floating dtype.
        labels: ``[...]``, integers in [0, V), or ignore_index for a token without loss and
            gradient.
        split: this rank's first vocabulary entry, and the group of ranks that share the vocabulary,
            if these logits cover only a part of it. The call is then collective, with the same
            labels on all ranks.

    Returns:
        loss_sum, a float32 (float64) scalar, differentiable once, and valid_count, an int64 scalar.

    Raises:
        ValueError: the shapes do not match. A label out of range is an IndexError on the CPU and a
            device-side assertion on CUDA.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}, but logits has {tuple(logits.shape[:-1])} x "
            "V; the shapes must agree in all dimensions but V"
        )
    loss = _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten(), ignore_index, split)
    return loss, (labels != ignore_index).sum()


def _float_chunks(logits: Tensor) -> list[slice]:
    """Cut the rows of logits [N, V] into chunks of at most LOSS_CHUNK elements."""
    rows = max(1, LOSS_CHUNK[device_type_of(logits)] // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, split: Split | None
    ) -> Tensor:
        dtype = accum_dtype(logits.dtype)
        valid = labels != ignore_index  # [N]
        if split is None:
            first = 0
            local = valid
        else:
            first, group = split
            local = valid & (labels >= first) & (labels < first + logits.shape[1])
        column = (labels - first).where(local, 0)  # [N]

        lse = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        for rows in _float_chunks(logits):
            torch.logsumexp(logits[rows].to(dtype), dim=-1, out=lse[rows])
        label_logit = logits.gather(-1, column[:, None])[:, 0].to(dtype)
        if split is not None:
            # lse covers only this rank's entries so far. A label's logit is on one rank, so a sum
            # with zeros from the other ranks delivers it; one message carries both sums.
            largest = lse.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            sums = torch.stack(((lse - largest).exp(), label_logit.where(local, 0)))  # [2, N]
            dist.all_reduce(sums, group=group)
            lse = largest + sums[0].log()
            label_logit = sums[1]

        ctx.save_for_backward(logits, column, local, valid, lse)
        return (lse - label_logit).where(valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, local, valid, lse = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in _float_chunks(logits):
            if grad.dtype == lse.dtype:  # computed in place, inside grad
                chunk = torch.sub(logits[rows], lse[rows, None], out=grad[rows])
            else:
                chunk = logits[rows].to(lse.dtype, copy=True).sub_(lse[rows, None])
            # The gradient is softmax(logits) minus one at the label.
            chunk.exp_()
            chunk.scatter_add_(-1, column[rows, None], -local[rows, None].to(chunk.dtype))
            chunk.mul_(grad_loss).masked_fill_(~valid[rows, None], 0)
            if chunk.dtype != grad.dtype:
                grad[rows] = chunk
        return grad, None, None, None


def over_chunks(fn: RowFunction, x: Tensor, size: int, parameters: Sequence[Tensor]) -> Tensor:
    """Apply fn to x [N, C], ``size`` rows at a time (Liu & Abbeel 2023); return [N, ...].

    Only x is saved between forward and backward pass; the backward pass recomputes each chunk, so
    that the activations of one chunk exist at a time. Parameter gradients accumulate in float32 or
    wider and are rounded once: autograd would round every partial sum of a bfloat16 model.
    Differentiable once.

    Args:
        fn: the same deterministic function of each row (no dropout).
        parameters: every tensor besides x that fn uses and that may need a gradient.
    """
    return _OverChunks.apply(fn, size, x, *parameters)


def sum_over_chunks(fn: RowFunction, x: Tensor, size: int, parameters: Sequence[Tensor]) -> Tensor:
    """Sum a scalar fn over x [N, C], ``size`` rows at a time, and compute each chunk once.

    The forward pass knows all gradients up to one factor, the gradient of the sum. So it computes
    them with each chunk, and saves the gradient of x in x's dtype and those of the parameters in
    float32 or wider; the backward pass multiplies them by the factor (Hsu et al. 2024, Liger
    Kernel, linear cross entropy). Arguments as in ``over_chunks``.
    """
    return _SumOverChunks.apply(fn, size, torch.is_grad_enabled(), x, *parameters)


def _chunks(x: Tensor, size: int) -> Iterator[slice]:
    for start in range(0, len(x), size):
        yield slice(start, min(start + size, len(x)))


class ChunkGradients:
    """Gradients of chunks: of x row by row, and of parameters as sums in float32 or wider."""

    def __init__(self, x: Tensor, parameters: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
        need_x, *self._needs_grad = needs_grad
        self._trained: list[Tensor] = []
        for parameter, needed in zip(parameters, self._needs_grad, strict=True):
            if needed:
                self._trained.append(parameter)
        self._dx = torch.empty_like(x) if need_x else None
        # Allocated with the first chunk, since a gradient may be sharded differently from its
        # parameter.
        self._sums: list[Tensor] = []

    def add(self, fn: RowFunction, x: Tensor, rows: slice, grad: Tensor | None = None) -> Tensor:
        """Compute a chunk, add its gradients, and return its result.

        ``grad`` is the gradient of the result; None means 1.
        """
        chunk = self.leaf(x[rows])
        with graph_of_chunk():
            out = fn(chunk, rows)
        self.add_through(rows, chunk, [out], [grad])
        return out.detach()

    def leaf(self, chunk: Tensor) -> Tensor:
        """Return a part of x as the beginning of a graph of its own."""
        return chunk.detach().requires_grad_(self._dx is not None)

    def add_through(
        self,
        rows: Any,
        chunk: Tensor,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        leaves: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Add the gradients of a chunk's graph; return those of other leaves of the graph.

        Args:
            rows: index of the chunk in x.
            chunk: the leaf from which the graph was computed.
            outputs, grads: results of the graph and their gradients; None means 1.
            leaves: tensors besides ``chunk`` and the parameters that need gradients.
        """
        inputs = [*self._trained, *leaves]
        if self._dx is not None:
            inputs = [chunk, *inputs]
        gradients = torch.autograd.grad(outputs, inputs, grads)
        if self._dx is not None:
            self._dx[rows] = gradients[0]
            gradients = gradients[1:]
        count = len(self._trained)
        others = gradients[count:]
        gradients = gradients[:count]

        if self._sums:
            for total, gradient in zip(self._sums, gradients, strict=True):
                total += gradient
        else:
            for gradient, parameter in zip(gradients, self._trained, strict=True):
                self._sums.append(gradient.to(accum_dtype(parameter.dtype), copy=True))
        return others

    def times(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients of x and of all parameters, times ``factor``, in their dtypes.

        The gradient is None for a tensor that needs none.
        """
        if factor is not None:
            # The factor keeps one dimension: a scalar would be rounded to bfloat16 before the
            # product.
            factor = factor.reshape(1)
            if self._dx is not None:
                self._dx.mul_(factor)
            for total in self._sums:
                total.mul_(factor)

        sums = iter(zip(self._sums, self._trained, strict=True))
        gradients = [self._dx]
        for needed in self._needs_grad:
            if needed:
                total, parameter = next(sums)
                gradients.append(total.to(parameter.dtype))
            else:
                gradients.append(None)
        return gradients


@contextmanager
def graph_of_chunk() -> Iterator[None]:
    """Compute a chunk with gradients, whatever the mode and the saved-tensor hooks around it.

    A checkpoint around this would recompute everything for each chunk that reads a saved tensor.
    """
    with torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):
        yield


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _OverChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: RowFunction, size: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.size = size
        # The parameters do not go through save_for_backward, which would return detached tensors
        # under activation checkpointing.
        ctx.parameters = parameters
        ctx.save_for_backward(x)
        out: Tensor | None = None
        for rows in _chunks(x, size):
            chunk = fn(x[rows], rows)
            if out is None:
                out = chunk.new_empty(len(x), *chunk.shape[1:])
            out[rows] = chunk
        assert out is not None, "there is at least one row"
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradients = ChunkGradients(x, ctx.parameters, ctx.needs_input_grad[2:])
        for rows in _chunks(x, ctx.size):
            gradients.add(ctx.fn, x, rows, grad[rows])
        return None, None, *gradients.times()


class _SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fn: RowFunction, size: int, trains: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        if not trains or not any(ctx.needs_input_grad):
            return torch.stack([fn(x[rows], rows) for rows in _chunks(x, size)]).sum()
        ctx.gradients = ChunkGradients(x, parameters, ctx.needs_input_grad[3:])
        return torch.stack([ctx.gradients.add(fn, x, rows) for rows in _chunks(x, size)]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "sum_over_chunks keeps its gradients for one backward pass, but this is a second"
                " one; run the forward pass again"
            )
        gradients = ctx.gradients.times(grad)
        ctx.gradients = None
        return None, None, None, *gradients
