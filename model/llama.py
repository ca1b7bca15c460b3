"""LLaMA (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Its kin (``model.traits``) have other norms or gates: Gemma 3 (arXiv:2503.19786) and OLMo 3 (arXiv:2512.13961), whose
layers with a window have rope of their own, and Qwen3.5 and OLMo Hybrid with a gated delta rule in three layers of
four.
"""

from functools import partial

from model.attention import Attend, HybridAttention, attention_of, norm_of, sdpa
from model.base import LanguageModel, RecurrentModel
from model.config import ModelConfig
from model.layers import BothNormsLayer, PostNormLayer, PreNormLayer, SwiGLU
from model.linear.delta import DeltaAttention, OneDevice

LAYERS = {"pre": PreNormLayer, "post": PostNormLayer, "both": BothNormsLayer}


def layer_of(config: ModelConfig, layer: int, attends: HybridAttention) -> PreNormLayer:
    """Build a layer, counted from 0: softmax attention or a delta rule, and a feed-forward."""
    softmax, traits = config.has_softmax(layer), config.traits
    core = attention_of(config, layer, attends.softmax) if softmax else DeltaAttention(config, layer, attends.linear)
    kind = LAYERS[traits.norms] if softmax else PreNormLayer
    norm = partial(norm_of(config), config.hidden_size, eps=config.norm_epsilon)
    return kind(norm, core, SwiGLU(config.hidden_size, config.ffn_size, traits.activation))


class Llama(LanguageModel):
    """LLaMA language model: token ids -> logits."""

    def __init__(self, config: ModelConfig, attend: Attend | HybridAttention = sdpa) -> None:
        attends = attend if isinstance(attend, HybridAttention) else HybridAttention(softmax=attend)
        layers = (layer_of(config, layer, attends) for layer in range(config.num_layers))
        super().__init__(config, norm_of(config)(config.hidden_size, eps=config.norm_epsilon), layers)


class DeltaHybrid(Llama, RecurrentModel):
    """Qwen3.5 or OLMo Hybrid: a LLaMA most of whose layers have a gated delta rule."""

    places = LanguageModel.places

    def __init__(self, config: ModelConfig, attend: HybridAttention | None = None) -> None:
        super().__init__(config, attend or HybridAttention(OneDevice(), sdpa))
