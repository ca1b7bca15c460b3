"""Apply a function of rows chunk by chunk, in forward and backward (Liu & Abbeel 2023, blockwise).

Shapes: N rows (tokens), C their width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

OfRows = Callable[[Tensor, slice], Tensor]
"""(rows [n, C], their slice) -> [n, ...], or a scalar to be summed."""


def over_chunks(fn: OfRows, x: Tensor, size: int, parameters: Sequence[Tensor]) -> Tensor:
    """Apply fn to x [N, C], ``size`` rows at a time; return the results stacked [N, ...].

    Only x is kept between forward and backward; the backward recomputes each chunk, so that the activations of one
    chunk exist at a time. Parameter gradients accumulate in float32 or wider and are rounded once: autograd would round
    every partial sum of a bfloat16 model. Differentiable once.

    Args:
        fn: the same deterministic function of each row (no dropout).
        parameters: every tensor besides x that fn uses and that may need a gradient.
    """
    return _OverChunks.apply(fn, size, x, *parameters)


def sum_over_chunks(fn: OfRows, x: Tensor, size: int, parameters: Sequence[Tensor]) -> Tensor:
    """Sum fn, which returns scalars, over x [N, C], ``size`` rows at a time; as ``over_chunks``, but computed once.

    A sum's gradient is known but for a factor: the forward computes it with each chunk, and keeps that of x in its
    dtype and those of the parameters in float32 or wider (Hsu et al. 2024, Liger Kernel, linear cross entropy).
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
        # Without hooks: a checkpoint around this would compute all again for each chunk that reads what it keeps.
        with torch.enable_grad(), saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            out = fn(part, rows)
        found = torch.autograd.grad(out, self._wanted if self._dx is None else [part, *self._wanted], grad)
        if self._dx is not None:
            self._dx[rows], found = found[0], found[1:]
        if self._sums:
            for total, one in zip(self._sums, found, strict=True):
                total += one
        else:
            wide = [torch.promote_types(p.dtype, torch.float32) for p in self._wanted]
            self._sums = [one.to(dtype, copy=True) for one, dtype in zip(found, wide, strict=True)]
        return out.detach()

    def times(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients of x and of all parameters, in their dtypes; None for what needs none."""
        for one in (self._dx, *self._sums):
            if factor is not None and one is not None:
                one.mul_(factor.reshape(1))  # of one dimension, else it is rounded to bfloat16 before
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
    def forward(ctx: Any, fn: OfRows, size: int, trains: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        if not trains or not any(ctx.needs_input_grad):
            return torch.stack([fn(x[rows], rows) for rows in _chunks(x, size)]).sum()
        ctx.gradients = _Gradients(x, parameters, ctx.needs_input_grad[3:])
        return torch.stack([ctx.gradients.add(fn, x, rows) for rows in _chunks(x, size)]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a sum over chunks are kept for one backward, and this is another")
        found, ctx.gradients = ctx.gradients.times(grad), None
        return None, None, None, *found
