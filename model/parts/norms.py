"""Norms of the residual stream and of heads.

Shapes: B sequences, T tokens, H heads, D width of a head, C width of the residual stream.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from model.parts.weights import Inits, Splits
from runtime.tensors import accum_dtype

# Normalises 16-bit inputs in float32 and rounds once, at the end (Zhang & Sennrich 2019, eq. 4);
# the fused kernel saves x and one number per token. Hugging Face also rounds before multiplying by
# the weight, which changes a quarter of the bf16 outputs.
RMSNorm = nn.RMSNorm


class ZeroCentredRMSNorm(nn.RMSNorm):
    """RMS norm times 1 + weight; weights start at 0.

    Computed in float32, since 1 + weight in bfloat16 keeps few of the weight's digits.
    """

    INIT: ClassVar[Inits] = {"weight": "zeros"}

    scale: float = 1.0
    """Factor of the result, applied before it is rounded."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Normalise x; its shape and dtype stay the same.

        Args:
            weight: replaces the module's weight, which is a DTensor under tensor parallelism.
        """
        dtype = accum_dtype(x.dtype)
        if weight is None:
            weight = self.weight
        weight = self.scale * (1 + weight.to(dtype))
        return F.rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


class JointRMSNorm(nn.RMSNorm):
    """RMS norm over the channels of all heads together: [B, T, H, D] -> [B, T, H, D]."""

    SPLIT: ClassVar[Splits] = {"weight": "all_heads"}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


# Has a weight and a bias; like RMSNorm, it computes in float32 and rounds once.
LayerNorm = nn.LayerNorm
