"""LLaMA (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B sequences, T tokens, C width of the residual stream.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kernels.cache import States
from model.attention import Attend, attention_of, sdpa
from model.base import LanguageModel, output_module
from model.config import ModelConfig
from model.layers import RMSNorm, Rotary, SwiGLU


class Layer(nn.Module):
    """One pre-norm transformer layer: [B, T, C] -> [B, T, C]."""

    def __init__(self, config: ModelConfig, layer: int, attend: Attend) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = RMSNorm(width, eps=config.norm_epsilon)
        self.attention = attention_of(config, layer, attend)
        self.mlp_norm = RMSNorm(width, eps=config.norm_epsilon)
        self.mlp = SwiGLU(width, config.ffn_size)

    def forward(self, x: Tensor, rotary: Rotary, mask: Any = None, states: States | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, mask, states)
        return x + self.mlp(self.mlp_norm(x))


class Llama(LanguageModel):
    """LLaMA language model: token ids -> logits."""

    def __init__(self, config: ModelConfig, attend: Attend = sdpa) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer, attend) for layer in range(config.num_layers))
        self.norm: nn.Module | None = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.output = output_module(config)

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Any = None, states: States | None = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedded(tokens)  # [B, T, C]
        rotary = Rotary(positions, self.config.head_dim, self.config, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, mask, states)
        return x if self.norm is None else self.norm(x)
