"""A function of rows, computed a chunk of rows at a time in forward and backward (Liu & Abbeel 2023, blockwise).

Shapes: N rows (tokens), C their width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

OfRows = Callable[[Tensor, slice], Tensor]
"""Part of the rows [n, C], and which ones they are -> [n, ...], or a scalar that is to be summed."""


def over_chunks(fn: OfRows, x: Tensor, size: int, parameters: Sequence[Tensor], *, summed: bool = False) -> Tensor:
    """fn of x [N, C], ``size`` rows at a time: its results side by side [N, ...], or their sum where ``summed``.

    Between forward and backward x alone is kept; the backward computes each chunk again, and no more than one chunk's
    inside exists at a time. Gradients of the parameters add up in float32 at least and are rounded once: autograd's own
    sum over the chunks of a bfloat16 model would round every partial sum. Differentiable once.

    Args:
        fn: the same function of each row, deterministic (no dropout).
        parameters: every tensor that fn uses besides x and that may need a gradient.
    """
    return _OverChunks.apply(fn, size, summed, x, *parameters)


def _chunks(x: Tensor, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, len(x))) for start in range(0, len(x), size))


class _OverChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: OfRows, size: int, summed: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.fn, ctx.size, ctx.summed = fn, size, summed
        # Not among the saved tensors, which a checkpoint around this hands back detached from their gradients' place.
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
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in wanted]
        dx = torch.empty_like(x) if need_x else None
        for rows in _chunks(x, ctx.size):
            part = x[rows].detach().requires_grad_(need_x)
            with torch.enable_grad():
                out = ctx.fn(part, rows)
            inputs = [part, *wanted] if need_x else wanted
            found = torch.autograd.grad(out, inputs, grad if ctx.summed else grad[rows])
            if dx is not None:
                dx[rows], found = found[0], found[1:]
            for total, one in zip(sums, found, strict=True):
                total += one
            del part, out, inputs, found  # or the next chunk would be computed beside this one
        totals = iter(total.to(p.dtype) for total, p in zip(sums, wanted, strict=True))
        return None, None, None, dx, *(next(totals) if needed else None for needed in need)
