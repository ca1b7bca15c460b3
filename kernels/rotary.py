"""Rotary positions applied to queries or keys (Su et al. 2021), channels i and i + D/2 a pair.

Shapes: x ``[B, T, H, D]``, cos and sin ``[T, 1, D/2]``, or ``[B, T, 1, D/2]`` or ``[1, T, 1, D/2]``,
float32 or wider.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton import has_triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x by its tokens' angles; computed in the dtype of cos, returned in x's.

    On a GPU in one launch where Triton is there; torch takes eight, and 12 times as much memory traffic in bfloat16.
    torch.compile fuses torch's own.
    """
    if torch.compiler.is_compiling() or not x.is_cuda or cos.dtype != torch.float32 or not has_triton():
        return turned(x, cos, sin)
    return _Rotated.apply(x, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x by torch's operators."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # [B, T, H, D/2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from kernels.triton.rotary import rotate as in_one_launch

        ctx.save_for_backward(cos, sin)
        return in_one_launch(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Turn the gradient back."""
        from kernels.triton.rotary import rotate as in_one_launch

        cos, sin = ctx.saved_tensors
        return in_one_launch(gradient, cos, sin, back=True), None, None
