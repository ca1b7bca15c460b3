"""What a GPU's kernels return and keep, in shapes and dtypes alone: a CPU has others, or composes operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.attention import AttentionBackend

WORKSPACES = 2 * (32 << 20)
"""Bytes that torch gives cuBLAS and cuBLASLt to work in, on Hopper; on older GPUs fewer."""
SHAPES = AttentionBackend(
    "shapes",
    lambda q, k, v, *_: (torch.empty_like(q), torch.empty_like(q[..., 0], dtype=torch.float32)),
    lambda dout, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)
"""A block's attention in the shapes and dtypes of a GPU's kernels."""


class _FusedNorm(torch.autograd.Function):
    """RMSNorm in the shapes of a GPU's kernel, which keeps its input and a number a token.

    On a CPU torch composes it of operators, which keep four times as much.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        dw = None if weight is None else (grad * x).flatten(0, -2).sum(0).to(weight.dtype)
        return torch.empty_like(x), dw


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return what torch.nn.functional.rms_norm would, empty."""
    return _FusedNorm.apply(x, weight)


class _FusedRotation(torch.autograd.Function):
    """A rotation in the shapes of its one launch; torch's operators make copies in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient, memory_format=torch.contiguous_format)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what ``kernels.pointwise.rotate`` would, empty."""
    return _FusedRotation.apply(x)
