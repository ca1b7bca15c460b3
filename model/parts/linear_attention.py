"""Linear attention of two models, which keeps a state of constant size.

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
    """Linear attention, which has embeddings times the root of their width."""

    no_scale_embedding: bool = False
    """Leave the embeddings of a model with linear attention as they are, not times the root of
    hidden_size.
    """

    linear_attention = True

    def check(self) -> None:
        """Check the heads."""
        super().check()
        heads = self.num_attention_heads
        must = f"linear attention has one key head per query head, {heads} here; leave it out"
        require(self, self.query_groups == heads, "num_query_groups", must)

    @property
    def some_softmax(self) -> bool:
        """Return whether some layer has softmax attention."""
        return self.softmax_period is not None

    def has_softmax(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has softmax attention."""
        return False

    @property
    def own_softmax_layout(self) -> bool:
        """Return whether layers of softmax attention may lie in another layout than those of linear
        attention.
        """
        return self.some_softmax

    def architecture(self) -> Architecture:
        """Return that of ``DecoderConfig``, with the scale of embeddings."""
        return super().architecture() | {
            "linear_decay": None,
            "no_scale_embedding": self.no_scale_embedding,
        }

    def embedding_scale(self, dtype: torch.dtype) -> float | None:
        """Return the factor of the embeddings (Vaswani et al. 2017, section 3.4)."""
        return None if self.no_scale_embedding else math.sqrt(self.hidden_size)


def released_decay(heads: int, layers: int, layer: int) -> tuple[float, ...]:
    """Return the log decays of the heads in a layer, counted from 0; deeper layers forget less.

    That is -slope of the head * (1 - layer / (layers - 1) + 1e-5), with ALiBi's slopes, as
    TransNormerLLM's released models have it.
    """
    depth = 1 - layer / max(layers - 1, 1) + 1e-5
    return tuple(-slope * depth for slope in alibi_slopes(heads))


def paper_decay(heads: int, layers: int, layer: int) -> tuple[float, ...]:
    """Return the log decays as TransNormerLLM's paper has them: the last layer forgets nothing.

    That is -8 h / H * (1 - l / L) with h and l counted from 1.
    """
    return tuple(-8 * (head + 1) / heads * (1 - (layer + 1) / layers) for head in range(heads))


def alibi_slopes(heads: int) -> list[float]:
    """Return slopes 2^(-8 h / H), h from 1; if H is no power of two, fill up from the next one
    (Press et al. 2022).
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    return slopes if whole == heads else slopes + alibi_slopes(2 * whole)[::2][: heads - whole]


def initial_angles(weight: Beginning) -> Tensor:
    """Return the angles j of LRPE, 10000^(-2 j / channels); an ``Init``."""
    channels = weight.shape[0]
    exponents = -2 / channels * torch.arange(channels, dtype=torch.float64)
    return (10000.0**exponents).float()[weight.part]


class LRPE(nn.Module):
    """Linearized relative positions (Qin et al. 2023b): x -> [x cos(theta t), x sin(theta t)],
    twice as wide.

    The product of two such vectors turns by theta (s - t). theta [H * D] is learned, an angle per
    head and channel. It stays in float32 when the rest is bfloat16, whose angles are off by up to 2
    radians at position 1000.
    """

    full_precision = True
    """Read by parallel/data.py and Decoder.cast."""
    INIT: ClassVar[Inits] = {"theta": initial_angles}
    SPLIT: ClassVar[Splits] = {"theta": "heads"}

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = nn.Parameter(torch.empty(heads * head_dim))

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor, theta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map q and k [B, T, H, D] at positions [T] or [B, T] to [B, T, H, 2 D] each, in their
        dtype.

        ``theta`` [H * D] is of these heads: under tensor parallelism a device holds some of them.
        """
        angles = (
            (self.theta if theta is None else theta).unflatten(0, (-1, self.head_dim)).double()
        )  # [H, D]
        turns = torch.remainder(
            angles * positions[..., None, None], 2 * math.pi
        )  # exact far beyond float32's reach
        turns = turns.to(accum_dtype(q.dtype))  # [T, H, D] or [B, T, H, D]
        cos, sin = turns.cos(), turns.sin()
        q, k = (torch.cat((x * cos, x * sin), dim=-1).to(x.dtype) for x in (q, k))
        return q, k


class TokenMixer(LinearCore):
    """Projections, SiLU on queries and keys, positions in the first layer, linear attention, norm,
    gate, output.
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
        """Build it; ``log_decay`` is of each head."""
        super().__init__()
        width, heads, self.head_dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
        )
        inside = heads * self.head_dim
        self.attend = attend
        self.layer, self.log_decay = layer, log_decay
        self.lrpe = LRPE(heads, self.head_dim) if layer == 0 else None
        self.wq, self.wk, self.wv, self.wu = (Linear(width, inside, bias=False) for _ in range(4))
        self.norm = RMSNorm(inside, eps=config.norm_epsilon, elementwise_affine=False)
        self.wo = Linear(inside, width, bias=False)

    def forward(
        self, x: Tensor, places: Tensor | Rotary, mask: Any = None, states: States | None = None
    ) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )  # [B, T, H, D]
        q, k = F.silu(q), F.silu(k)
        if self.lrpe is not None:
            q, k = self.lrpe(
                q, k, places.positions if isinstance(places, Rotary) else places
            )  # [B, T, H, 2 D]
        out = self.core(q, k, v, self.log_decay, mask, states, self.layer)  # [B, T, H, D]
        return self.wo(self.wu(x) * self.norm(out.flatten(-2)))


def features(x: Tensor) -> Tensor:
    """Return elu(x) + 1, not as a sum, which would round to 0 for very negative channels: a divisor
    uses them.
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
        exponents = (
            torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device)
            / self.width
        )  # [C/2]
        angles = positions.to(torch.float64)[..., None] * 10000.0**-exponents
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class LinearAttention(LinearCore):
    """Projections with biases, features, linear attention normalised by the sum of weights, output
    projection.
    """

    INIT: ClassVar[Inits] = {"wq": "qkv", "wk": "qkv", "wv": "qkv", "wo": "residual"}
    SPLIT: ClassVar[Splits] = {"wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows"}

    def __init__(self, config: DecoderConfig, layer: int, attend: LinearAttend) -> None:
        super().__init__()
        width, heads, self.head_dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
        )
        self.attend, self.layer = attend, layer
        self.wq, self.wk, self.wv = (Linear(width, heads * self.head_dim) for _ in range(3))
        self.wo = Linear(heads * self.head_dim, width)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Any = None, states: States | None = None
    ) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )  # [B, T, H, D]
        # An extra value channel of ones computes the normaliser z, so its state travels with the
        # others.
        v = F.pad(v, (0, 1), value=1.0)  # [B, T, H, D + 1]
        out = self.core(features(q), features(k), v, (0.0,) * q.shape[2], mask, states, self.layer)
        return self.wo((out[..., :-1] / out[..., -1:]).flatten(-2))
