"""TransNormerLLM (Qin et al. 2023, arXiv:2307.14995), as its released models compute.

Linear attention with decay, its output normalised and gated, and a gated feed-forward without an activation. The norms
have no weights. With softmax_every the model is a hybrid: every so many-th layer has softmax attention with rotary
positions, as every eighth in MiniMax-01 (2025, arXiv:2501.08313).

Shapes: B sequences, T tokens, H heads, D width of a head, C width of the residual stream.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from model.attention import HybridAttention, LinearAttend, LinearCore, attention_of, linear
from model.base import RecurrentModel
from model.config import ModelConfig
from model.layers import SGLU, Linear, PreNormLayer, RMSNorm, Rotary


def log_decay_of(config: ModelConfig, layer: int) -> tuple[float, ...]:
    """Return the log decays of the heads in a layer, counted from 0; deeper layers forget less.

    released: -slope of the head * (1 - layer / (layers - 1) + 1e-5), with ALiBi's slopes. paper: -8 h / H * (1 - l / L)
    with h and l counted from 1: the last layer forgets nothing.
    """
    heads, layers = config.num_attention_heads, config.num_layers
    if config.linear_decay == "paper":
        return tuple(-8 * (head + 1) / heads * (1 - (layer + 1) / layers) for head in range(heads))
    depth = 1 - layer / max(layers - 1, 1) + 1e-5
    return tuple(-slope * depth for slope in alibi_slopes(heads))


def alibi_slopes(heads: int) -> list[float]:
    """Return slopes 2^(-8 h / H), h from 1; if H is no power of two, fill up from the next one (Press et al. 2022)."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    return slopes if whole == heads else slopes + alibi_slopes(2 * whole)[::2][: heads - whole]


class LRPE(nn.Module):
    """Linearized relative positions (Qin et al. 2023b): x -> [x cos(theta t), x sin(theta t)], twice as wide.

    The product of two such vectors turns by theta (s - t). theta [H * D] is learned, an angle per head and channel. It
    stays in float32 when the rest is bfloat16, whose angles are off by up to 2 radians at position 1000.
    """

    full_precision = True
    """Read by parallel/data.py and LanguageModel.cast."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = nn.Parameter(torch.empty(heads * head_dim))

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map q and k [B, T, H, D] at positions [T] or [B, T] to [B, T, H, 2 D] each, in their dtype."""
        return self.by(q, k, positions, theta=self.theta)

    def by(self, q: Tensor, k: Tensor, positions: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `forward` with theta [H * D] of these heads: under tensor parallelism a device holds some of them."""
        angles = theta.unflatten(0, (-1, self.head_dim)).double()  # [H, D]
        turns = torch.remainder(angles * positions[..., None, None], 2 * math.pi)  # exact far beyond float32's reach
        turns = turns.to(torch.promote_types(q.dtype, torch.float32))  # [T, H, D] or [B, T, H, D]
        cos, sin = turns.cos(), turns.sin()
        q, k = (torch.cat((x * cos, x * sin), dim=-1).to(x.dtype) for x in (q, k))
        return q, k


class TokenMixer(LinearCore):
    """Projections, SiLU on queries and keys, positions in the first layer, linear attention, norm, gate, output."""

    def __init__(self, config: ModelConfig, layer: int, attend: LinearAttend) -> None:
        super().__init__()
        width, heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        inside = heads * self.head_dim
        self.attend = attend
        self.layer, self.log_decay = layer, log_decay_of(config, layer)
        self.lrpe = LRPE(heads, self.head_dim) if layer == 0 else None
        self.wq, self.wk, self.wv, self.wu = (Linear(width, inside, bias=False) for _ in range(4))
        self.norm = RMSNorm(inside, eps=config.norm_epsilon, elementwise_affine=False)
        self.wo = Linear(inside, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Any = None, states: States | None = None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # [B, T, H, D]
        q, k = F.silu(q), F.silu(k)
        if self.lrpe is not None:
            q, k = self.lrpe(q, k, positions)  # [B, T, H, 2 D]
        out = self.core(q, k, v, self.log_decay, mask, states, self.layer)  # [B, T, H, D]
        return self.wo(self.wu(x) * self.norm(out.flatten(-2)))


def _norm(config: ModelConfig) -> "partial[RMSNorm]":
    return partial(RMSNorm, config.hidden_size, eps=config.norm_epsilon, elementwise_affine=False)


class Layer(PreNormLayer):
    """A layer with linear attention or, in a hybrid, softmax attention and rotary positions."""

    def __init__(self, config: ModelConfig, layer: int, attends: HybridAttention) -> None:
        softmax = config.has_softmax(layer)
        core = attention_of(config, layer, attends.softmax) if softmax else TokenMixer(config, layer, attends.linear)
        super().__init__(_norm(config), core, SGLU(config.hidden_size, config.ffn_size))
        self.rope, self.head_dim = config if softmax else None, config.head_dim

    def forward(self, x: Tensor, positions: Tensor, mask: Any = None, states: States | None = None) -> Tensor:
        places = positions if self.rope is None else Rotary(positions, self.head_dim, self.rope, x.dtype)
        return super().forward(x, places, mask, states)


class TransNormer(RecurrentModel):
    """TransNormer language model: token ids -> logits."""

    def __init__(self, config: ModelConfig, attend: LinearAttend | HybridAttention = linear) -> None:
        attends = attend if isinstance(attend, HybridAttention) else HybridAttention(linear=attend)
        layers = (Layer(config, layer, attends) for layer in range(config.num_layers))
        super().__init__(config, _norm(config)(), layers)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().embed(tokens, positions) * self.config.embedding_scale
