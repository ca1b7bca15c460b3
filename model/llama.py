"""LLaMA (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from functools import partial

from model.attention import Attend, attention_of, sdpa
from model.base import LanguageModel
from model.config import ModelConfig
from model.layers import PreNormLayer, RMSNorm, SwiGLU


class Llama(LanguageModel):
    """LLaMA language model: token ids -> logits."""

    def __init__(self, config: ModelConfig, attend: Attend = sdpa) -> None:
        norm = partial(RMSNorm, config.hidden_size, eps=config.norm_epsilon)
        layers = (
            PreNormLayer(norm, attention_of(config, layer, attend), SwiGLU(config.hidden_size, config.ffn_size))
            for layer in range(config.num_layers)
        )
        super().__init__(config, norm(), layers)
