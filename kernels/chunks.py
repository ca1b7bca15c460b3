"""Apply a function of rows chunk by chunk, in forward and backward (Liu & Abbeel 2023, blockwise).

Shapes: N rows (tokens), C their width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

OfRows = Callable[[Tensor, slice], Tensor]
"""(rows [n, C], their slice) -> [n, ...], or a scalar to be summed."""


def over_chunks(fn: OfRows, x: Tensor, size: int, parameters: Sequence[Tensor], *, summed: bool = False) -> Tensor:
    """Apply fn to x [N, C], ``size`` rows at a time; return the results stacked [N, ...], or their sum if ``summed``.

    Only x is kept between forward and backward; the backward recomputes each chunk, so that the activations of one
    chunk exist at a time. Parameter gradients accumulate in float32 or wider and are rounded once: autograd would round
    every partial sum of a bfloat16 model. Differentiable once.

    Args:
        fn: the same deterministic function of each row (no dropout).
        parameters: every tensor besides x that fn uses and that may need a gradient.
    """
    return _OverChunks.apply(fn, size, summed, x, *parameters)


def _chunks(x: Tensor, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, len(x))) for start in range(0, len(x), size))


class _OverChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: OfRows, size: int, summed: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.fn, ctx.size, ctx.summed = fn, size, summed
        # Not in save_for_backward: activation checkpointing around this would return them detached.
        ctx.parameters = parameters
        ctx.save_for_backward(x)
        out: Tensor | None = None
        for rows in _chunks(x, size):
            part = fn(x[rows], rows)
            if summed:
                out = part if out is None else out + part
            else:
                out = part.new_empty(len(x), *part.shape[1:]) if out is None else out
                out[rows] = part
        assert out is not None, "there is at least one row"
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad[3:]
        wanted = [p for p, needed in zip(ctx.parameters, need, strict=True) if needed]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in wanted]
        sums: list[Tensor] = []  # begun by the first chunk: a gradient may be divided otherwise than its parameter
        dx = torch.empty_like(x) if need_x else None
        for rows in _chunks(x, ctx.size):
            part = x[rows].detach().requires_grad_(need_x)
            with torch.enable_grad():
                out = ctx.fn(part, rows)
            inputs = [part, *wanted] if need_x else wanted
            found = torch.autograd.grad(out, inputs, grad if ctx.summed else grad[rows])
            if dx is not None:
                dx[rows], found = found[0], found[1:]
            sums = sums or [one.to(dtype, copy=True).zero_() for one, dtype in zip(found, wide, strict=True)]
            for total, one in zip(sums, found, strict=True):
                total += one
            del part, out, inputs, found  # free this chunk before the next one is computed
        totals = iter(total.to(p.dtype) for total, p in zip(sums, wanted, strict=True))
        return None, None, None, dx, *(next(totals) if needed else None for needed in need)
