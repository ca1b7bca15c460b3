"""Two kinds of linear attention, which keep a state of constant size instead of keys and values.

TransNormerLLM's (Qin et al. 2023, arXiv:2307.14995) has decay, and its output is normalised and
gated. The Linear Transformer's (Katharopoulos et al. 2020) has features elu + 1 and no decay.
Sinusoidal positions (Vaswani et al. 2017, section 3.5) are added to the embeddings and set no
maximum length.

Shapes: B sequences, T tokens, H heads, D width of a head, C width of the residual stream.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from model.config import Architecture, DecoderConfig
from model.parts.attention import LinearAttend, LinearCore
from model.parts.norms import RMSNorm
from model.parts.projections import Linear
from model.parts.rotary import Rotary
from model.parts.weights import Beginning, Inits, Splits
from runtime.errors import require
from runtime.tensors import accum_dtype


@dataclass(frozen=True, kw_only=True)
class LinearConfig(DecoderConfig):
    """Settings of linear attention; embeddings are scaled by the root of their width."""

    no_scale_embedding: bool = False
    """Do not multiply the embeddings of a model with linear attention by sqrt(hidden_size)."""

    linear_attention = True

    def check(self) -> None:
        super().check()
        heads = self.num_attention_heads
        must = f"linear attention needs one key head per query head, here {heads}; leave it out"
        require(self, self.query_groups == heads, "num_query_groups", must)

    @property
    def some_softmax(self) -> bool:
        return self.softmax_period is not None

    def has_softmax(self, layer: int) -> bool:
        return False

    @property
    def own_softmax_layout(self) -> bool:
        return self.some_softmax

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the scale of embeddings."""
        return super().architecture() | {
            "linear_decay": None,
            "no_scale_embedding": self.no_scale_embedding,
        }

    def embedding_scale(self, dtype: torch.dtype) -> float | None:
        """Return the factor of the embeddings (Vaswani et al. 2017, section 3.4)."""
        return None if self.no_scale_embedding else math.sqrt(self.hidden_size)


def released_decay(heads: int, layers: int, layer: int) -> tuple[float, ...]:
    """Return the log decay of each head, as in TransNormerLLM's released models.

    It is -slope * (1 - layer / (layers - 1) + 1e-5) with the head's ALiBi slope and the layer
    counted from 0, so deeper layers forget less.
    """
    depth = 1 - layer / max(layers - 1, 1) + 1e-5
    return tuple(-slope * depth for slope in alibi_slopes(heads))


def paper_decay(heads: int, layers: int, layer: int) -> tuple[float, ...]:
    """Return the log decay of each head, as in TransNormerLLM's paper.

    It is -8 h / H * (1 - l / L) with h and l counted from 1, so the last layer forgets nothing.
    """
    return tuple(-8 * (head + 1) / heads * (1 - (layer + 1) / layers) for head in range(heads))


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes 2^(-8 h / H), h from 1 (Press et al. 2022).

    If H is not a power of two, they are the slopes of the next lower power, followed by every
    second slope of the next higher power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    if power == heads:
        return slopes
    return slopes + alibi_slopes(2 * power)[::2][: heads - power]


def initial_angles(weight: Beginning) -> Tensor:
    """Return LRPE's initial angle of each channel j, 10000^(-2 j / channels); an ``Init``."""
    channels = weight.shape[0]
    exponents = -2 / channels * torch.arange(channels, dtype=torch.float64)
    return (10000.0**exponents).float()[weight.part]


class LRPE(nn.Module):
    """Linearized relative positions: x -> [x cos(theta t), x sin(theta t)], twice as wide.

    The product of two such vectors at positions t and s rotates by theta (s - t), so linear
    attention sees relative positions (Qin et al. 2023b). theta [H * D] is learned, an angle per
    head and channel. It stays float32 when the rest is bfloat16: bfloat16 angles would be off by up
    to 2 radians at position 1000.
    """

    full_precision = True
    """Keep the parameters float32; parallel/data.py and ``Decoder.cast`` read this."""
    INIT: ClassVar[Inits] = {"theta": initial_angles}
    SPLIT: ClassVar[Splits] = {"theta": "heads"}

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = nn.Parameter(torch.empty(heads * head_dim))

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor, theta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return q and k [B, T, H, 2 D] in their dtype.

        Args:
            q: [B, T, H, D].
            k: [B, T, H, D].
            positions: integers [T] or [B, T].
            theta: [H * D], the angles of this device's heads; by default those of all heads of the
                layer.
        """
        if theta is None:
            theta = self.theta
        angles = theta.unflatten(0, (-1, self.head_dim)).double()  # [H, D]
        # Products with large positions exceed float32's precision, so they are reduced in float64.
        turns = torch.remainder(angles * positions[..., None, None], 2 * math.pi)
        turns = turns.to(accum_dtype(q.dtype))  # [T, H, D] or [B, T, H, D]
        cos = turns.cos()
        sin = turns.sin()
        q = torch.cat((q * cos, q * sin), dim=-1).to(q.dtype)
        k = torch.cat((k * cos, k * sin), dim=-1).to(k.dtype)
        return q, k


class TokenMixer(LinearCore):
    """TransNormerLLM's gated linear attention with decay: [B, T, C] -> [B, T, C].

    In order: projections, SiLU of q and k, LRPE in the first layer, linear attention, a norm
    without weights over all heads, a gate, the output projection.
    """

    INIT: ClassVar[Inits] = {
        "wq": "qkv",
        "wk": "qkv",
        "wv": "qkv",
        "wu": "matrix",
        "wo": "residual",
    }
    SPLIT: ClassVar[Splits] = {
        "log_decay": "heads",
        "wq": "columns",
        "wk": "columns",
        "wv": "columns",
        "wu": "columns",
        "norm": "all_heads",
        "wo": "rows",
    }

    def __init__(
        self, config: DecoderConfig, layer: int, attend: LinearAttend, log_decay: tuple[float, ...]
    ) -> None:
        """Build the modules; ``log_decay`` has a number per head."""
        super().__init__()
        hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        qkv_size = config.num_attention_heads * self.head_dim
        self.attend = attend
        self.layer = layer
        self.log_decay = log_decay
        self.lrpe = LRPE(config.num_attention_heads, self.head_dim) if layer == 0 else None
        self.wq = Linear(hidden_size, qkv_size, bias=False)
        self.wk = Linear(hidden_size, qkv_size, bias=False)
        self.wv = Linear(hidden_size, qkv_size, bias=False)
        self.wu = Linear(hidden_size, qkv_size, bias=False)
        self.norm = RMSNorm(qkv_size, eps=config.norm_epsilon, elementwise_affine=False)
        self.wo = Linear(qkv_size, hidden_size, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor | Rotary, mask: Any = None, states: States | None = None
    ) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q = F.silu(q)
        k = F.silu(k)
        if self.lrpe is not None:
            if isinstance(positions, Rotary):  # made for a hybrid's softmax layers
                positions = positions.positions
            q, k = self.lrpe(q, k, positions)  # [B, T, H, 2 D]
        out = self.core(q, k, v, self.log_decay, mask, states, self.layer)  # [B, T, H, D]
        return self.wo(self.wu(x) * self.norm(out.flatten(-2)))  # [B, T, C]


def features(x: Tensor) -> Tensor:
    """Return elu(x) + 1, computed as exp(x) for negative x.

    For very negative x, the sum would round to 0, and the features enter a divisor.
    """
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


class Sinusoids(nn.Module):
    """Sines, then cosines, of position * 10000^(-2 i / C) in float64: [...] -> [..., C].

    A module, so that tensor parallelism can split its tokens.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device)
        exponents = exponents / self.width  # [C/2]
        angles = positions.to(torch.float64)[..., None] * 10000.0**-exponents  # [..., C/2]
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class LinearAttention(LinearCore):
    """The Linear Transformer's attention, without decay: [B, T, C] -> [B, T, C].

    Projections have biases, q and k become features, and the output is divided by the sum of the
    weights.
    """

    INIT: ClassVar[Inits] = {"wq": "qkv", "wk": "qkv", "wv": "qkv", "wo": "residual"}
    SPLIT: ClassVar[Splits] = {"wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows"}

    def __init__(self, config: DecoderConfig, layer: int, attend: LinearAttend) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        qkv_size = config.num_attention_heads * self.head_dim
        self.attend = attend
        self.layer = layer
        self.wq = Linear(hidden_size, qkv_size)
        self.wk = Linear(hidden_size, qkv_size)
        self.wv = Linear(hidden_size, qkv_size)
        self.wo = Linear(qkv_size, hidden_size)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Any = None, states: States | None = None
    ) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        # One more value channel, of ones, sums the weights: the divisor is then part of the state
        # and reaches the other ranks with it.
        v = F.pad(v, (0, 1), value=1.0)  # [B, T, H, D + 1]
        log_decay = (0.0,) * q.shape[2]
        out = self.core(features(q), features(k), v, log_decay, mask, states, self.layer)
        return self.wo((out[..., :-1] / out[..., -1:]).flatten(-2))  # [B, T, C]
