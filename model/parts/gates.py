"""Vector parameters of a gated delta rule: its gates, and the taps of its convolution.

Shapes: B sequences, T tokens, H value heads, D width of a key head.
"""

import math
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.parts.weights import Inits, Splits, constant, drawn, uniform
from runtime.tensors import accum_dtype


class Taps(nn.Module):
    """The weight of a depthwise convolution, stored as a vector [channels * taps].

    As a vector, like the weight of a norm, it gets no weight decay.
    """

    SPLIT: ClassVar[Splits] = {"weight": "heads"}

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.INIT: Inits = {"weight": uniform(taps**-0.5)}  # as in nn.Conv1d
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels * taps))

    def forward(self, weight: Tensor | None = None) -> Tensor:
        """Return the weight as [channels, taps]; the last tap is for the token itself.

        Args:
            weight: the weight of this device's channels; by default of all channels.
        """
        if weight is None:
            weight = self.weight
        return weight.unflatten(0, (-1, self.taps))


class Gates(nn.Module):
    """Log gates -exp(A_log) softplus(a + dt_bias) <= 0, per head or per channel.

    Gates and their parameters stay float32 when the rest is bfloat16: gates are multiplied over a
    whole sequence, so their errors accumulate.
    """

    full_precision = True
    """Keep the parameters float32; parallel/data.py and ``Decoder.cast`` read this."""
    SPLIT: ClassVar[Splits] = {"A_log": "heads", "dt_bias": "heads"}

    def __init__(
        self,
        heads: int,
        channels: int = 1,
        *,
        min_rate: float = 0.01,
        dt_ones: bool = False,
    ) -> None:
        """Build the parameters.

        Args:
            channels: number of gates per head.
            min_rate: minimum of the initial exp(A_log).
            dt_ones: initialize dt_bias to 1.
        """
        super().__init__()
        initial_dt = partial(constant, 1.0) if dt_ones else partial(drawn, initial_bias)
        self.INIT: Inits = {
            "A_log": partial(drawn, partial(initial_rate, minimum=min_rate)),
            "dt_bias": initial_dt,
        }
        self.channels = channels
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels))

    def forward(
        self, a: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None
    ) -> Tensor:
        """Return the log gates [B, T, H], or [B, T, H, D] per channel, float32 or wider.

        Args:
            a: a projection of the tokens, [B, T, H] or [B, T, H * D].
            A_log: [H], for this device's heads; by default for all heads.
            dt_bias: [H] or [H * D], for this device's heads; by default for all heads.
        """
        if A_log is None:
            A_log = self.A_log
        if dt_bias is None:
            dt_bias = self.dt_bias
        rates = F.softplus(a.to(accum_dtype(a.dtype)) + dt_bias)
        if self.channels == 1:
            return -A_log.exp() * rates  # [B, T, H]
        return -A_log.exp()[:, None] * rates.unflatten(-1, (-1, self.channels))  # [B, T, H, D]


def initial_rate(x: Tensor, minimum: float, *, generator: torch.Generator) -> Tensor:
    """Fill x, an A_log, with logs of uniform numbers from ``minimum`` to 16.

    The published models use this distribution.
    """
    return x.uniform_(minimum, 16, generator=generator).log_()


def initial_bias(x: Tensor, *, generator: torch.Generator) -> Tensor:
    """Fill x with softplus^-1 of step sizes from 0.001 to 0.1, log-uniform as in Mamba."""
    steps = x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().clamp_(min=1e-4)
    return x.copy_(steps + (-torch.expm1(-steps)).log())
