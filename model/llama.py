"""LLaMA (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B sequences, T tokens, C width of the residual stream.
"""

from torch import nn

from model.attention import Attend, attention_of, sdpa
from model.base import LanguageModel, output_module
from model.config import ModelConfig
from model.layers import PreNormLayer, RMSNorm, SwiGLU


class Layer(PreNormLayer):
    def __init__(self, config: ModelConfig, layer: int, attend: Attend) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = RMSNorm(width, eps=config.norm_epsilon)
        self.attention = attention_of(config, layer, attend)
        self.mlp_norm = RMSNorm(width, eps=config.norm_epsilon)
        self.mlp = SwiGLU(width, config.ffn_size)


class Llama(LanguageModel):
    """LLaMA language model: token ids -> logits."""

    def __init__(self, config: ModelConfig, attend: Attend = sdpa) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocabulary, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer, attend) for layer in range(config.num_layers))
        self.norm: nn.Module | None = RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.output = output_module(config)
