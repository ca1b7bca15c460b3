"""Summed cross entropy, and functions of rows chunk by chunk, with little memory beyond what they
are given.

Shapes: N rows (tokens), C their width, V vocabulary entries.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from runtime.simulation import device_type_of
from runtime.tensors import accum_dtype

# Elements of the float32 copy alive at a time: 4 MiB fit a CPU's cache, 128 MiB keep a GPU busy.
LOSS_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}

Split = tuple[int, dist.ProcessGroup]
"""The first of this rank's vocabulary entries, and the ranks that have the others."""
OfRows = Callable[[Tensor, slice], Tensor]
"""(rows [n, C], their slice) -> [n, ...], or a scalar to be summed."""


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, split: Split | None = None
) -> tuple[Tensor, Tensor]:
    """Sum -log softmax(logits)[label] over tokens, and count the tokens.

    Computed in float32 (float64 for float64 logits), a chunk of rows at a time: between forward and
    backward only the logits themselves are kept at their size.

    Args:
        logits: ``[..., V]``, any floating dtype.
        labels: ``[...]``, integers in [0, V), or ignore_index for a token without loss and
            gradient.
        split: given if these logits are of some entries only; collective then, with the same labels
            on all ranks.

    Returns:
        loss_sum, a float32 (float64) scalar, differentiable once, and valid_count, an int64 scalar.

    Raises:
        ValueError: the shapes do not match. A label out of range is an IndexError on the CPU and a
            device-side assertion on CUDA.
    """
    if logits.shape[:-1] != labels.shape:
        shapes = tuple(labels.shape), tuple(logits.shape[:-1])
        raise ValueError(f"labels {shapes[0]} and logits {shapes[1]} x V must agree in all but V")
    loss = _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten(), ignore_index, split)
    return loss, (labels != ignore_index).sum()


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of logits [N, V], to be processed in float32 one at a time."""
    rows = max(1, LOSS_CHUNK[device_type_of(logits)] // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, split: Split | None
    ) -> Tensor:
        dtype = accum_dtype(logits.dtype)
        first, group = split or (0, None)
        valid = labels != ignore_index  # [N]
        here = (
            valid
            if split is None
            else valid & (labels >= first) & (labels < first + logits.shape[1])
        )
        column = (labels - first).where(here, 0)
        lse = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        for rows in _row_chunks(logits):
            torch.logsumexp(logits[rows].to(dtype), dim=-1, out=lse[rows])
        chosen = logits.gather(-1, column[:, None])[:, 0].to(dtype)
        if split is not None:  # so far of these entries alone
            largest = lse.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            sums = torch.stack(
                ((lse - largest).exp(), chosen.where(here, 0))
            )  # [2, N]: one message for both
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


def over_chunks(fn: OfRows, x: Tensor, size: int, parameters: Sequence[Tensor]) -> Tensor:
    """Apply fn to x [N, C], ``size`` rows at a time (Liu & Abbeel 2023); return the results stacked
    [N, ...].

    Only x is kept between forward and backward; the backward recomputes each chunk, so that the
    activations of one chunk exist at a time. Parameter gradients accumulate in float32 or wider and
    are rounded once: autograd would round every partial sum of a bfloat16 model. Differentiable
    once.

    Args:
        fn: the same deterministic function of each row (no dropout).
        parameters: every tensor besides x that fn uses and that may need a gradient.
    """
    return _OverChunks.apply(fn, size, x, *parameters)


def sum_over_chunks(fn: OfRows, x: Tensor, size: int, parameters: Sequence[Tensor]) -> Tensor:
    """Sum fn, which returns scalars, over x [N, C], ``size`` rows at a time; as ``over_chunks``,
    but computed once.

    A sum's gradient is known but for a factor: the forward computes it with each chunk, and keeps
    that of x in its dtype and those of the parameters in float32 or wider (Hsu et al. 2024, Liger
    Kernel, linear cross entropy).
    """
    return _SumOverChunks.apply(fn, size, torch.is_grad_enabled(), x, *parameters)


def _chunks(x: Tensor, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, len(x))) for start in range(0, len(x), size))


class _Gradients:
    """The gradients of chunks: of x row by row, of parameters as sums in float32 or wider."""

    def __init__(self, x: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool]) -> None:
        need_x, *self._needed = needed
        self._wanted = [p for p, wanted in zip(parameters, self._needed, strict=True) if wanted]
        self._dx = torch.empty_like(x) if need_x else None
        # Begun by the first chunk: a gradient may be divided otherwise than its parameter.
        self._sums: list[Tensor] = []

    def add(self, fn: OfRows, x: Tensor, rows: slice, grad: Tensor | None = None) -> Tensor:
        """Compute a chunk and add its gradients, given its result's, or 1; return the result."""
        part = x[rows].detach().requires_grad_(self._dx is not None)
        # Without hooks: a checkpoint around this would compute all again for each chunk that reads
        # what it keeps.
        with torch.enable_grad(), saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            out = fn(part, rows)
        found = torch.autograd.grad(
            out, self._wanted if self._dx is None else [part, *self._wanted], grad
        )
        if self._dx is not None:
            self._dx[rows], found = found[0], found[1:]
        if self._sums:
            for total, one in zip(self._sums, found, strict=True):
                total += one
        else:
            wide = [accum_dtype(p.dtype) for p in self._wanted]
            self._sums = [one.to(dtype, copy=True) for one, dtype in zip(found, wide, strict=True)]
        return out.detach()

    def times(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients of x and of all parameters, in their dtypes; None for what needs
        none.
        """
        for one in (self._dx, *self._sums):
            if factor is not None and one is not None:
                one.mul_(
                    factor.reshape(1)
                )  # of one dimension, else it is rounded to bfloat16 before
        totals = iter(total.to(p.dtype) for total, p in zip(self._sums, self._wanted, strict=True))
        return [self._dx, *(next(totals) if needed else None for needed in self._needed)]


class _OverChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: OfRows, size: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.fn, ctx.size = fn, size
        # Not in save_for_backward: activation checkpointing around this would return them detached.
        ctx.parameters = parameters
        ctx.save_for_backward(x)
        out: Tensor | None = None
        for rows in _chunks(x, size):
            part = fn(x[rows], rows)
            out = part.new_empty(len(x), *part.shape[1:]) if out is None else out
            out[rows] = part
        assert out is not None, "there is at least one row"
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradients = _Gradients(x, ctx.parameters, ctx.needs_input_grad[2:])
        for rows in _chunks(x, ctx.size):
            gradients.add(ctx.fn, x, rows, grad[rows])
        return None, None, *gradients.times()


class _SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fn: OfRows, size: int, trains: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        if not trains or not any(ctx.needs_input_grad):
            return torch.stack([fn(x[rows], rows) for rows in _chunks(x, size)]).sum()
        ctx.gradients = _Gradients(x, parameters, ctx.needs_input_grad[3:])
        return torch.stack([ctx.gradients.add(fn, x, rows) for rows in _chunks(x, size)]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients of a sum over chunks are kept for one backward, and this is another"
            )
        found, ctx.gradients = ctx.gradients.times(grad), None
        return None, None, None, *found
