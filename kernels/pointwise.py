"""Operators without a product of matrices that a GPU does in one launch: rotary positions, and a feed-forward's gate.

torch.compile fuses torch's own operators, which are taken there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton import has_triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their tokens' angles (Su et al. 2021), channels i and i + D/2 a pair.

    On a GPU in one launch where Triton is there; torch takes eight, and 12 times as much memory traffic in bfloat16.

    Args:
        x: ``[B, T, H, D]``.
        cos, sin: ``[T, 1, D/2]``, ``[B, T, 1, D/2]`` or ``[1, T, 1, D/2]``, float32 or wider, in which it is computed.

    Returns:
        ``[B, T, H, D]`` in x's dtype.
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
        from kernels.triton.pointwise import rotate as in_one_launch

        ctx.save_for_backward(cos, sin)
        return in_one_launch(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Turn the gradient back."""
        from kernels.triton.pointwise import rotate as in_one_launch

        cos, sin = ctx.saved_tensors
        return in_one_launch(gradient, cos, sin, back=True), None, None


Activation = Literal["silu", "gelu"]
"""gelu is its tanh form (Hendrycks & Gimpel 2016)."""
ACTIVATIONS: dict[Activation, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu": (partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")),
}
"""Each with its gradient, of that of its result and its input."""


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up (Shazeer 2020, eq. 6) for gate and up of one shape and dtype; keep these two alone.

    Differentiable once. Autograd would keep activation(gate) too, which the backward computes again. On a GPU in one
    launch each way where Triton is there; torch takes two and three, and 1.7 and 1.8 times as much memory traffic.
    """
    if torch.compiler.is_compiling():
        return ACTIVATIONS[activation][0](gate) * up
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        if _in_one_launch(gate):
            from kernels.triton.pointwise import gated

            return gated(gate, up, activation)
        return ACTIVATIONS[activation][0](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if _in_one_launch(gate):
            from kernels.triton.pointwise import gated_backward

            return *gated_backward(gradient, gate, up, ctx.activation), None
        activation, slope = ACTIVATIONS[ctx.activation]
        dgate = gradient * up
        slope(dgate, gate, grad_input=dgate)
        return dgate, activation(gate).mul_(gradient), None


def _in_one_launch(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and has_triton()
