"""GPT (Radford et al. 2019): LayerNorm, GELU, biases; learned positions as in GPT-2, or rotary.

Shapes: B sequences, T tokens, C width of the residual stream.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.cache import States
from model.attention import Attend, attention_of, sdpa
from model.base import LanguageModel
from model.config import ModelConfig
from model.layers import MLP, LayerNorm, PreNormLayer, Rotary


class GPT(LanguageModel):
    """GPT language model: token ids -> logits."""

    only_first = ("position_embedding",)
    position_embedding: nn.Embedding | None

    def __init__(self, config: ModelConfig, attend: Attend = sdpa) -> None:
        width, table = config.hidden_size, config.position_table
        norm = partial(LayerNorm, width, eps=config.norm_epsilon)
        layers = (
            PreNormLayer(norm, attention_of(config, layer, attend, bias=True), MLP(width, config.ffn_size))
            for layer in range(config.num_layers)
        )
        positions = nn.Embedding(table, width) if table is not None else None
        super().__init__(config, norm(), layers, position_embedding=positions)

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
