"""The gated delta rule as a layer, whose attention keeps a state of constant size.

Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464) has the gated delta rule, and Kimi Delta Attention
(Kimi Linear 2025, arXiv:2510.26692) gates per channel.

Shapes: B sequences, T tokens, C width of the residual stream, K key heads of width D, H value heads of width E.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from kernels.operators import gated
from kernels.ops import causal_convolution, delta_rule
from model.config import ModelConfig
from model.parts.attention import refuse_mask
from model.parts.norms import RMSNorm
from model.parts.projections import Bottleneck, Linear
from model.parts.weights import Inits, Splits, constant, drawn, uniform
from runtime.tensors import accum_dtype

L2_EPSILON = 1e-6
"""Added to the squares of queries and keys before they are normalised."""


class DeltaAttend(Protocol):
    """The core of a layer with a delta rule, and the convolution before it: they alone see other tokens."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None) -> Tensor:
        """Return ``kernels.delta.rule.delta_rule`` of the whole sequence [B, T, H, E]; ``mask`` as in Attend."""

    def convolve(self, x: Tensor, weight: Tensor, mask: Any = None) -> Tensor:
        """Return the causal convolution [B, T, X] of x [B, T, X] with weight [X, taps]."""


class OneDevice:
    """A DeltaAttend of one device that holds the whole sequence in order."""

    def __init__(self, documents: Callable[[Any], Sequence[int] | None] = refuse_mask, backend: str = "auto") -> None:
        """Set it up; ``documents`` returns the cumulative lengths that a mask says."""
        self._documents, self._backend = documents, backend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None) -> Tensor:
        return delta_rule(q, k, v, g, beta, documents=self._documents(mask), backend=self._backend)[0]

    def convolve(self, x: Tensor, weight: Tensor, mask: Any = None) -> Tensor:
        """Do as in DeltaAttend."""
        return causal_convolution(x, weight, documents=self._documents(mask))


class Taps(nn.Module):
    """The weight of a convolution of each channel, [channels * taps], a vector as a norm's: it does not decay."""

    SPLIT: ClassVar[Splits] = {"weight": "heads"}

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.INIT: Inits = {"weight": uniform(taps**-0.5)}  # nn.Conv1d's
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels * taps))

    def forward(self, weight: Tensor | None = None) -> Tensor:
        """Return it, or that of this device's channels, as [channels, taps]; the last is of the token itself."""
        return (self.weight if weight is None else weight).unflatten(0, (-1, self.taps))


class Gates(nn.Module):
    """Log gates -exp(A_log) softplus(a + dt_bias) <= 0 of a projection a [B, T, H], or of each channel [B, T, H * D].

    They and their parameters are float32 when the rest is bfloat16.
    """

    full_precision = True
    """Read by parallel/data.py and LanguageModel.cast."""
    SPLIT: ClassVar[Splits] = {"A_log": "heads", "dt_bias": "heads"}

    def __init__(
        self,
        heads: int,
        channels: int = 1,
        *,
        min_rate: float = 0.01,
        dt_ones: bool = False,
    ) -> None:
        """Build them; rates begin at ``min_rate`` or more, and with ``dt_ones`` biases at 1."""
        super().__init__()
        self.INIT: Inits = {
            "A_log": partial(drawn, partial(initial_rate, least=min_rate)),
            "dt_bias": partial(constant, 1.0) if dt_ones else partial(drawn, initial_bias),
        }
        self.channels = channels
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels))

    def forward(self, a: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None) -> Tensor:
        """Return [B, T, H], or [B, T, H, D], of these heads; by their parameters, where a device holds some of them."""
        A_log = self.A_log if A_log is None else A_log
        dt_bias = self.dt_bias if dt_bias is None else dt_bias
        rates = F.softplus(a.to(accum_dtype(a.dtype)) + dt_bias)
        if self.channels == 1:
            return -A_log.exp() * rates
        return -A_log.exp()[:, None] * rates.unflatten(-1, (-1, self.channels))


class DeltaAttention(nn.Module):
    """Projections, a convolution and SiLU of q, k and v, the gated delta rule, a norm and gate per head, the output.

    The projections are separate linears, so that tensor parallelism can split each by key heads and their value heads;
    the convolution is one, so that what it reads of other devices travels once.
    """

    INIT: ClassVar[Inits] = {
        "wq": "qkv",
        "wk": "qkv",
        "wv": "qkv",
        "wu": "matrix",
        "wa": "matrix",
        "wb": "matrix",
        "out_norm": "ones",
        "wo": "residual",
    }
    SPLIT: ClassVar[Splits] = {
        "wq": "columns",
        "wk": "columns",
        "wv": "columns",
        "wu": "columns",
        "wa": "columns",
        "wb": "columns",
        "out_norm": "whole",
        "wo": "rows",
    }

    def __init__(self, config: ModelConfig, layer: int, attend: DeltaAttend) -> None:
        super().__init__()
        self.layer = layer
        """Its place in ``States``."""
        self.attend, self.convolve = attend, attend.convolve
        width, taps, traits = config.hidden_size, config.linear_conv_kernel_dim, config.traits
        self.key_dim, self.value_dim, self.most_beta = config.key_dim, config.value_dim, traits.most_beta
        heads, keys, values = config.value_heads, config.key_heads * self.key_dim, config.value_heads * self.value_dim
        self.wq, self.wk, self.wv = (Linear(width, out, bias=False) for out in (keys, keys, values))
        self.conv_q, self.conv_k, self.conv_v = (Taps(channels, taps) for channels in (keys, keys, values))
        self.per_channel = config.linear_gate == "per_channel"
        channels = self.key_dim if self.per_channel else 1
        through = partial(Bottleneck, width, self.value_dim) if self.per_channel else partial(Linear, width, bias=False)
        self.wu, self.wa, self.wb = through(values), through(heads * channels), Linear(width, heads, bias=False)
        self.gates = Gates(
            heads,
            channels,
            min_rate=1.0 if self.per_channel else 0.01,
            dt_ones=traits.dt_ones and not self.per_channel,
        )
        self.out_norm = RMSNorm(self.value_dim, eps=traits.out_epsilon or config.norm_epsilon)
        self.wo = Linear(values, width, bias=False)

    def forward(self, x: Tensor, places: Any = None, mask: Any = None, states: States | None = None) -> Tensor:
        """Apply it to x [B, T, C]; with states, read and replace this layer's."""
        if states is not None and not states.shared and (more := x.shape[1] - states.count):
            return F.pad(self.forward(x[:, : states.count], states=states), (0, 0, 0, more))
        parts = [w(x) for w in (self.wq, self.wk, self.wv)]  # heads of this device, [B, T, K D or H E]
        weight = torch.cat([conv() for conv in (self.conv_q, self.conv_k, self.conv_v)])
        rows = torch.cat(parts, -1)
        convolved = F.silu(self._convolved(rows, weight, mask, states))
        q, k, v = convolved.split([part.shape[-1] for part in parts], -1)
        q, k = (y.unflatten(-1, (-1, self.key_dim)) for y in (q, k))
        q, k = normalised(q, self.key_dim**-0.5), normalised(k)  # [B, T, K, D]
        v = v.unflatten(-1, (-1, self.value_dim))  # [B, T, H, E]
        g, b = self.gates(self.wa(x)), self.wb(x)  # [B, T, H] or [B, T, H, D]; [B, T, H]
        beta = self.most_beta * b.to(g.dtype).sigmoid()
        out = self.out_norm(self._core(q, k, v, g, beta, mask, states))  # [B, T, H, E]
        z = self.wu(x).view_as(out)
        return self.wo((out * z.sigmoid() if self.per_channel else gated(z, out)).flatten(-2))

    def _convolved(self, rows: Tensor, weight: Tensor, mask: Any, states: States | None) -> Tensor:
        if states is None:
            return self.convolve(rows, weight, *(() if mask is None else (mask,)))
        refuse_mask(mask)
        before, state = states.layers[self.layer] or (None, None)
        gap = weight.shape[1] - 1
        if states.shared:
            states.layers[self.layer] = states.last(rows, gap), None
            return self.convolve(rows, weight)
        seen = F.pad(rows, (0, 0, gap, 0)) if before is None else torch.cat((before, rows), 1)
        states.layers[self.layer] = seen[:, seen.shape[1] - gap :], state
        return causal_convolution(rows, weight, before)

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any, states: States | None
    ) -> Tensor:
        if states is None:
            return self.attend(q, k, v, g, beta, *(() if mask is None else (mask,)))
        before, state = states.layers[self.layer]
        if states.shared:
            attend: Any = self.attend  # parallel.context.linear.attention.DeltaAttention, as its devices share tokens
            out, state = attend.with_state(q, k, v, g, beta)
            states.layers[self.layer] = before, states.total(state)
            return out
        backend = "reference" if q.shape[1] == 1 else "auto"  # which goes token by token
        out, state = delta_rule(q, k, v, g, beta, state, backend=backend)
        states.layers[self.layer] = before, state
        return out


def normalised(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return each head's x [..., D] with norm ``scale``, computed in float32 or wider, in x's dtype."""
    wide = x.to(accum_dtype(x.dtype))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPSILON))).to(x.dtype)


def initial_rate(x: Tensor, least: float, *, generator: torch.Generator) -> Tensor:
    """Fill x with logs of numbers uniform from ``least`` to 16, the A_log of the published models."""
    return x.uniform_(least, 16, generator=generator).log_()


def initial_bias(x: Tensor, *, generator: torch.Generator) -> Tensor:
    """Fill x with the softplus^-1 of numbers whose logs are uniform from those of 0.001 to 0.1, as Mamba does."""
    steps = x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().clamp_(min=1e-4)
    return x.copy_(steps + (-torch.expm1(-steps)).log())
