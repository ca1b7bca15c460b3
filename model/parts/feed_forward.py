"""Feed-forwards: SwiGLU, GeGLU, SGLU, and GELU with biases.

Shapes: B sequences, T tokens, C width of the residual stream, F width inside the feed-forward.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kernels.operators import Activation, gated
from model.parts.projections import Linear
from model.parts.weights import Inits, Splits


class SwiGLU(nn.Module):
    """Gated feed-forward down(silu(gate(x)) * up(x)): [B, T, C] -> [B, T, C].

    Shazeer 2020, eq. 6. With GELU as the activation it is a GeGLU.
    """

    INIT: ClassVar[Inits] = {"gate": "matrix", "up": "matrix", "down": "residual"}
    SPLIT: ClassVar[Splits] = {"gate": "columns", "up": "columns", "down": "rows"}

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate = Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up = Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down = Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate(x), self.up(x), self.activation))  # [B, T, F] inside


class SGLU(SwiGLU):
    """Gated feed-forward without an activation, down(gate(x) * up(x)): [B, T, C] -> [B, T, C].

    From TransNormerLLM (Qin et al. 2023); only the product with the gate makes it nonlinear.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class MLP(nn.Module):
    """Feed-forward with biases, down(gelu(up(x))): [B, T, C] -> [B, T, C].

    GELU has the tanh form (Hendrycks & Gimpel 2016), as in GPT-2.
    """

    INIT: ClassVar[Inits] = {"up": "matrix", "down": "residual"}
    SPLIT: ClassVar[Splits] = {"up": "columns", "down": "rows"}

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.up = Linear(hidden_size, ffn_hidden_size)
        self.down = Linear(ffn_hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
