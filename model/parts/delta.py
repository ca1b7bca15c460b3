"""The gated delta rule as a layer, whose attention keeps a state of constant size.

Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464) has the gated delta rule, and
Kimi Delta Attention (Kimi Linear 2025, arXiv:2510.26692) gates per channel.

Shapes: B sequences, T tokens, C width of the residual stream, K key heads of width D, H value heads
of width E.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from kernels.operators import gated
from kernels.ops import causal_convolution, delta_rule
from model.config import DELTA_SIZES, Architecture
from model.parts.attention import HybridAttention, refuse_mask
from model.parts.norms import RMSNorm
from model.parts.projections import Bottleneck, Linear
from model.parts.settings import PeriodicConfig
from model.parts.weights import Inits, Splits, constant, drawn, uniform
from runtime.errors import at_least, require
from runtime.tensors import accum_dtype

L2_EPSILON = 1e-6
"""Added to the squares of queries and keys before they are normalised."""


class DeltaAttend(Protocol):
    """The core of a layer with a delta rule, and the convolution before it: they alone see other
    tokens.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None
    ) -> Tensor:
        """Return ``kernels.delta.rule.delta_rule`` of the whole sequence [B, T, H, E]; ``mask`` as
        in Attend.
        """

    def convolve(self, x: Tensor, weight: Tensor, mask: Any = None) -> Tensor:
        """Return the causal convolution [B, T, X] of x [B, T, X] with weight [X, taps]."""


class OneDevice:
    """A DeltaAttend of one device that holds the whole sequence in order."""

    def __init__(
        self, documents: Callable[[Any], Sequence[int] | None] = refuse_mask, backend: str = "auto"
    ) -> None:
        """Set it up; ``documents`` returns the cumulative lengths that a mask says."""
        self._documents, self._backend = documents, backend

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None
    ) -> Tensor:
        return delta_rule(q, k, v, g, beta, documents=self._documents(mask), backend=self._backend)[
            0
        ]

    def convolve(self, x: Tensor, weight: Tensor, mask: Any = None) -> Tensor:
        """Do as in DeltaAttend."""
        return causal_convolution(x, weight, documents=self._documents(mask))


class Taps(nn.Module):
    """The weight of a convolution of each channel, [channels * taps], a vector as a norm's: it does
    not decay.
    """

    SPLIT: ClassVar[Splits] = {"weight": "heads"}

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.INIT: Inits = {"weight": uniform(taps**-0.5)}  # nn.Conv1d's
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels * taps))

    def forward(self, weight: Tensor | None = None) -> Tensor:
        """Return it, or that of this device's channels, as [channels, taps]; the last is of the
        token itself.
        """
        return (self.weight if weight is None else weight).unflatten(0, (-1, self.taps))


class Gates(nn.Module):
    """Log gates -exp(A_log) softplus(a + dt_bias) <= 0 of a projection a [B, T, H], or of each
    channel [B, T, H * D].

    They and their parameters are float32 when the rest is bfloat16.
    """

    full_precision = True
    """Read by parallel/data.py and Decoder.cast."""
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

    def forward(
        self, a: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None
    ) -> Tensor:
        """Return [B, T, H], or [B, T, H, D], of these heads; by their parameters, where a device
        holds some of them.
        """
        A_log = self.A_log if A_log is None else A_log
        dt_bias = self.dt_bias if dt_bias is None else dt_bias
        rates = F.softplus(a.to(accum_dtype(a.dtype)) + dt_bias)
        if self.channels == 1:
            return -A_log.exp() * rates
        return -A_log.exp()[:, None] * rates.unflatten(-1, (-1, self.channels))


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(PeriodicConfig):
    """Layers with a gated delta rule between those of softmax attention."""

    RESOLVED: ClassVar[Mapping[str, str]] = DELTA_SIZES

    linear_num_key_heads: int | None = None
    """Key heads of a layer with a gated delta rule; by default num_attention_heads."""
    linear_num_value_heads: int | None = None
    """Value heads of a layer with a gated delta rule, a multiple of its key heads; by default as
    many.
    """
    linear_key_head_dim: int | None = None
    """Width of a key head of a layer with a gated delta rule; by default that of a head of softmax
    attention.
    """
    linear_value_head_dim: int | None = None
    """Width of a value head of a layer with a gated delta rule; by default that of a key head."""
    linear_conv_kernel_dim: int = 4
    """Tokens that the convolution before a gated delta rule sees, its own among them."""
    linear_gate: Literal["per_head", "per_channel"] = "per_head"
    """Gate of a delta rule: a number per head (Gated DeltaNet), or one per channel of each key,
    with output gates through a bottleneck too (Kimi Delta Attention)."""

    default_period = 4
    delta_rule = True
    max_beta = 1.0
    """Largest share of its change that a token's key writes: above 1 eigenvalues are negative."""
    dt_ones = False
    """True if the bias of the gates begins at 1, not as softplus^-1 of 0.001 to 0.1; not per
    channel.
    """

    def check(self) -> None:
        """Check the heads of layers with a gated delta rule."""
        super().check()
        self.check_counts(*DELTA_SIZES)
        at_least(self, 1, "linear_conv_kernel_dim")
        keys, values = self.key_heads, self.value_heads
        must = f"it must be a multiple of linear_num_key_heads {keys}"
        require(self, values % keys == 0, "linear_num_value_heads", must)
        must = f"a gate per channel takes one key head per value head, {values} here and {keys}; leave it out"
        require(self, values == keys or self.linear_gate == "per_head", "linear_gate", must)

    @property
    def out_epsilon(self) -> float:
        """Epsilon of the norm of a delta rule's output."""
        return self.norm_epsilon

    def cores(self, attend: Any) -> HybridAttention:
        """Return both cores of attention, by default those of one device."""
        return HybridAttention(OneDevice()) if attend is None else super().cores(attend)

    @property
    def linears(self) -> tuple[str, ...]:
        """The linear layers of a layer that may get an adapter; a gate per channel goes through a
        bottleneck.
        """
        gates = ("wu", "wb", "wa") if self.linear_gate == "per_head" else ("wu", "wb")
        return ("wq", "wk", "wv", *gates, "wo", "gate", "up", "down")

    @property
    def key_heads(self) -> int:
        """Key heads of a delta rule."""
        return self.linear_num_key_heads or self.num_attention_heads

    @property
    def value_heads(self) -> int:
        """Value heads of a delta rule."""
        return self.linear_num_value_heads or self.key_heads

    @property
    def key_dim(self) -> int:
        """Width of a delta rule's key head."""
        return self.linear_key_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a delta rule's value head."""
        return self.linear_value_head_dim or self.key_dim

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes of a layer that tensor parallelism divides, by their settings."""
        return {**super().shared_sizes, "linear_num_key_heads": self.key_heads}

    @property
    def state_elements(self) -> int:
        """Elements of the states of all layers with a delta rule, per sequence."""
        return self.recurrent_layers * self.value_heads * self.key_dim * self.value_dim

    def architecture(self) -> Architecture:
        """Return that of ``DecoderConfig``, with the delta rule's sizes and gate."""
        names = (*DELTA_SIZES, "linear_conv_kernel_dim", "linear_gate")
        return super().architecture() | self.resolved(*names) | {"rotary_percent": 1.0}


class DeltaAttention(nn.Module):
    """Projections, a convolution and SiLU of q, k and v, the gated delta rule, a norm and gate per
    head, the output.

    The projections are separate linears, so that tensor parallelism can split each by key heads and
    their value heads; the convolution is one, so that what it reads of other devices travels once.
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

    def __init__(self, config: DeltaConfig, layer: int, attend: DeltaAttend) -> None:
        super().__init__()
        self.layer = layer
        """Its place in ``States``."""
        self.attend, self.convolve = attend, attend.convolve
        width, taps = config.hidden_size, config.linear_conv_kernel_dim
        self.key_dim, self.value_dim, self.max_beta = (
            config.key_dim,
            config.value_dim,
            config.max_beta,
        )
        heads, keys, values = (
            config.value_heads,
            config.key_heads * self.key_dim,
            config.value_heads * self.value_dim,
        )
        self.wq, self.wk, self.wv = (Linear(width, out, bias=False) for out in (keys, keys, values))
        self.conv_q, self.conv_k, self.conv_v = (
            Taps(channels, taps) for channels in (keys, keys, values)
        )
        self.per_channel = config.linear_gate == "per_channel"
        channels = self.key_dim if self.per_channel else 1
        through = (
            partial(Bottleneck, width, self.value_dim)
            if self.per_channel
            else partial(Linear, width, bias=False)
        )
        self.wu, self.wa, self.wb = (
            through(values),
            through(heads * channels),
            Linear(width, heads, bias=False),
        )
        self.gates = Gates(
            heads,
            channels,
            min_rate=1.0 if self.per_channel else 0.01,
            dt_ones=config.dt_ones and not self.per_channel,
        )
        self.out_norm = RMSNorm(self.value_dim, eps=config.out_epsilon)
        self.wo = Linear(values, width, bias=False)

    def forward(
        self, x: Tensor, places: Any = None, mask: Any = None, states: States | None = None
    ) -> Tensor:
        """Apply it to x [B, T, C]; with states, read and replace this layer's."""
        if states is not None and not states.shared and (more := x.shape[1] - states.count):
            return F.pad(self.forward(x[:, : states.count], states=states), (0, 0, 0, more))
        parts = [
            w(x) for w in (self.wq, self.wk, self.wv)
        ]  # heads of this device, [B, T, K D or H E]
        weight = torch.cat([conv() for conv in (self.conv_q, self.conv_k, self.conv_v)])
        rows = torch.cat(parts, -1)
        convolved = F.silu(self._convolved(rows, weight, mask, states))
        q, k, v = convolved.split([part.shape[-1] for part in parts], -1)
        q, k = (y.unflatten(-1, (-1, self.key_dim)) for y in (q, k))
        q, k = normalised(q, self.key_dim**-0.5), normalised(k)  # [B, T, K, D]
        v = v.unflatten(-1, (-1, self.value_dim))  # [B, T, H, E]
        g, b = self.gates(self.wa(x)), self.wb(x)  # [B, T, H] or [B, T, H, D]; [B, T, H]
        beta = self.max_beta * b.to(g.dtype).sigmoid()
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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        mask: Any,
        states: States | None,
    ) -> Tensor:
        if states is None:
            return self.attend(q, k, v, g, beta, *(() if mask is None else (mask,)))
        before, state = states.layers[self.layer]
        if states.shared:
            attend: Any = (
                self.attend
            )  # parallel.context.linear.delta_attention.DeltaAttention, as its devices share tokens
            out, state = attend.with_state(q, k, v, g, beta)
            states.layers[self.layer] = before, states.total(state)
            return out
        backend = "reference" if q.shape[1] == 1 else "auto"  # which goes token by token
        out, state = delta_rule(q, k, v, g, beta, state, backend=backend)
        states.layers[self.layer] = before, state
        return out


def normalised(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return each head's x [..., D] with norm ``scale``, computed in float32 or wider, in x's
    dtype.
    """
    wide = x.to(accum_dtype(x.dtype))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPSILON))).to(
        x.dtype
    )


def initial_rate(x: Tensor, least: float, *, generator: torch.Generator) -> Tensor:
    """Fill x with logs of numbers uniform from ``least`` to 16, the A_log of the published models."""
    return x.uniform_(least, 16, generator=generator).log_()


def initial_bias(x: Tensor, *, generator: torch.Generator) -> Tensor:
    """Fill x with the softplus^-1 of numbers whose logs are uniform from those of 0.001 to 0.1, as
    Mamba does.
    """
    steps = x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().clamp_(min=1e-4)
    return x.copy_(steps + (-torch.expm1(-steps)).log())
