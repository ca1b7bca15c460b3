"""Linear layers that all parts use: a plain one, and a bottleneck of two."""

from typing import ClassVar

from torch import Tensor, nn

from kernels.operators import linear
from model.parts.weights import Inits, Splits


class Linear(nn.Linear):
    """``nn.Linear`` that uses the faster of two CPU libraries in float32: [..., I] -> [..., O]."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Bottleneck(nn.Module):
    """A low-rank projection through a few channels: [..., C] -> [..., out]."""

    INIT: ClassVar[Inits] = {"narrow": "matrix", "wide": "matrix"}
    SPLIT: ClassVar[Splits] = {"narrow": "whole", "wide": "columns"}

    def __init__(self, hidden_size: int, channels: int, out: int) -> None:
        super().__init__()
        self.narrow = Linear(hidden_size, channels, bias=False)
        self.wide = Linear(channels, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x))
