"""GPT (Radford et al. 2019): LayerNorm, GELU, biases; learned positions as in GPT-2, or rotary.

Shapes: B sequences, T tokens, C width of the residual stream.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kernels.cache import States
from model.attention import Attend, attention_of, sdpa
from model.base import LanguageModel, output_module
from model.config import ModelConfig
from model.layers import MLP, LayerNorm, PreNormLayer, Rotary


class Layer(PreNormLayer):
    def __init__(self, config: ModelConfig, layer: int, attend: Attend) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = LayerNorm(width, eps=config.norm_epsilon)
        self.attention = attention_of(config, layer, attend, bias=True)
        self.mlp_norm = LayerNorm(width, eps=config.norm_epsilon)
        self.mlp = MLP(width, config.ffn_size)


class GPT(LanguageModel):
    """GPT language model: token ids -> logits."""

    only_first = ("position_embedding",)

    def __init__(self, config: ModelConfig, attend: Attend = sdpa) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        table = config.position_table
        self.position_embedding = nn.Embedding(table, config.hidden_size) if table is not None else None
        self.layers = nn.ModuleList(Layer(config, layer, attend) for layer in range(config.num_layers))
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.output = output_module(config)

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, mask: Any = None, states: States | None = None
    ) -> Tensor:
        """Do as in LanguageModel. Learned positions, also of padding, must be below max_position_embeddings.

        Raises ValueError for more tokens than that without explicit positions.
        """
        table = self.config.position_table
        if positions is None and table is not None and tokens.shape[1] > table:
            raise ValueError(f"{tokens.shape[1]} tokens are more than max_position_embeddings {table}; give fewer")
        return super().hidden(tokens, positions, mask, states)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = super().embed(tokens, positions)
        # [B, T, C] + [T, C] or [B, T, C]
        return x if self.position_embedding is None else x + self.position_embedding(positions)

    def places(self, positions: Tensor, dtype: torch.dtype) -> Rotary | None:
        return super().places(positions, dtype) if self.config.position_table is None else None
