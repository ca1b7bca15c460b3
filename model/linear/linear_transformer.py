"""Linear Transformer (Katharopoulos et al. 2020): GPT layers with linear attention, features elu + 1, no decay.

Sinusoidal positions (Vaswani et al. 2017, section 3.5) are added to the embeddings and set no maximum length.

Shapes: B sequences, T tokens, H heads, D width of a head, C width of the residual stream.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from model.attention import LinearAttend, LinearCore, linear
from model.base import RecurrentModel
from model.config import ModelConfig
from model.layers import MLP, LayerNorm, Linear, PreNormLayer


def features(x: Tensor) -> Tensor:
    """Return elu(x) + 1, not as a sum, which would round to 0 for very negative channels: a divisor uses them."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


class Sinusoids(nn.Module):
    """Sines, then cosines, of position * 10000^(-2 i / C) in float64: [...] -> [..., C].

    A module, so that tensor parallelism can split its tokens.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width  # [C/2]
        angles = positions.to(torch.float64)[..., None] * 10000.0**-exponents
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class LinearAttention(LinearCore):
    """Projections with biases, features, linear attention normalised by the sum of weights, output projection."""

    def __init__(self, config: ModelConfig, layer: int, attend: LinearAttend) -> None:
        super().__init__()
        width, heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.attend, self.layer = attend, layer
        self.wq, self.wk, self.wv = (Linear(width, heads * self.head_dim) for _ in range(3))
        self.wo = Linear(heads * self.head_dim, width)

    def forward(self, x: Tensor, positions: Tensor, mask: Any = None, states: States | None = None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # [B, T, H, D]
        # An extra value channel of ones computes the normaliser z, so its state travels with the others.
        v = F.pad(v, (0, 1), value=1.0)  # [B, T, H, D + 1]
        out = self.core(features(q), features(k), v, (0.0,) * q.shape[2], mask, states, self.layer)
        return self.wo((out[..., :-1] / out[..., -1:]).flatten(-2))


class LinearTransformer(RecurrentModel):
    """Linear Transformer language model: token ids -> logits."""

    sinusoids: Sinusoids

    def __init__(self, config: ModelConfig, attend: LinearAttend = linear) -> None:
        width = config.hidden_size
        norm = partial(LayerNorm, width, eps=config.norm_epsilon)
        layers = (
            PreNormLayer(norm, LinearAttention(config, layer, attend), MLP(width, config.ffn_size))
            for layer in range(config.num_layers)
        )
        super().__init__(config, norm(), layers, sinusoids=Sinusoids(width))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(tokens, positions) * self.config.embedding_scale  # [B, T, C]
        return x + self.sinusoids(positions).to(x.dtype)
