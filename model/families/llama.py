"""LLaMA (Touvron et al. 2023) and related models: RMSNorm, rope, SwiGLU.

Mistral, Ministral, Qwen2 and Qwen3 are LLaMAs with other settings. All have half-split rotary pairs
and weights [out, in], so conversion only renames weights.
"""

from dataclasses import dataclass, replace

from torch import nn

from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.common import FIELDS, NAMES, ROPE_GROUP, SILU, SMALL_STD, WHOLE_HEADS, fields
from model.hf.family import REQUIRED, Family, KeyGroup, Need
from model.hf.parts import (
    WINDOWS,
    ministral_from_hf,
    qwen_from_hf,
    qwen_to_hf,
    window_from_hf,
    window_to_hf,
    windows_to_hf,
)
from model.parts.attention import HybridAttention
from model.parts.blocks import PreNormLayer
from model.parts.feed_forward import SwiGLU
from model.parts.settings import RopePositionsConfig, WindowedConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(WindowedConfig, RopePositionsConfig):
    """A LLaMA: RMSNorm, rope, SwiGLU, no biases."""

    model_type: str = "llama"
    add_qkv_bias: bool = False
    """Add biases to the query, key and value projections of a llama, as in Qwen2."""
    qk_layernorm: bool = False
    """Apply an RMS norm to the queries and keys of each head in a llama, as in Qwen3."""

    title = "LLaMA"
    footprint = Footprint(fused_residual=4.0, gated=True)

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        qk_norm = self.head_norm if self.qk_layernorm else None
        attention = self.attention(
            layer, cores.softmax, qkv_bias=self.add_qkv_bias, qk_norm=qk_norm
        )
        return PreNormLayer(self.norm, attention, SwiGLU(self.hidden_size, self.ffn_size))

    def architecture(self) -> Architecture:
        """Return the base class's entries, and those for biases and norms of queries and keys."""
        entries = super().architecture()
        for name in ("add_qkv_bias", "qk_layernorm"):
            if getattr(self, name):  # left out otherwise: older checkpoints lack these entries
                entries[name] = True
        return entries


LLAMA = Family(
    kind="llama",
    title="a LLaMA",
    architecture="LlamaForCausalLM",
    ours=LlamaConfig,
    fields=FIELDS,
    tied=False,
    groups=(ROPE_GROUP,),
    fixed={"add_qkv_bias": False, "qk_layernorm": False},
    only={
        **SILU,
        "mlp_bias": (False,),
        "sliding_window": (None,),
        "rope_interleaved": (None, False),
    },
    rates=("attention_dropout",),
    ignored=frozenset({"pretraining_tp", "max_sequence_length", "is_llama_config"}),
    needs=(
        Need("window_size", lambda config: not any(config.windows), "left out"),
        WHOLE_HEADS,
        SMALL_STD,
    ),
    names=NAMES,
    # Old checkpoints include the rotary frequencies, which follow from the configuration.
    derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
MISTRAL = replace(
    LLAMA,
    kind="mistral",
    title="a Mistral",
    architecture="MistralForCausalLM",
    fields=fields(num_key_value_heads=8, max_position_embeddings=131072),
    groups=(ROPE_GROUP, KeyGroup(WINDOWS[:1], window_from_hf, window_to_hf)),
    only={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
    },
    ignored=frozenset(),
    needs=(
        Need("window_attn_skip_freq", lambda config: len(set(config.windows)) == 1, "left out"),
    ),
)
MINISTRAL = replace(
    MISTRAL,
    kind="ministral",
    title="a Ministral",
    architecture="MinistralForCausalLM",
    fields=fields(num_key_value_heads=8, max_position_embeddings=131072, head_dim=REQUIRED),
    groups=(ROPE_GROUP, KeyGroup(WINDOWS, ministral_from_hf, windows_to_hf)),
    needs=(Need("window_size", lambda config: any(config.windows), "a width"),),
    instead_of="mistral",
    marker="layer_types",
)
QWEN2 = replace(
    MISTRAL,
    kind="qwen2",
    title="a Qwen2",
    architecture="Qwen2ForCausalLM",
    fields=fields(num_key_value_heads=32, max_position_embeddings=32768),
    groups=(
        ROPE_GROUP,
        KeyGroup(("use_sliding_window", "max_window_layers", *WINDOWS), qwen_from_hf, qwen_to_hf),
    ),
    fixed={"add_qkv_bias": True, "qk_layernorm": False},
    only={**MISTRAL.only, "use_mrope": (None, False)},
    needs=(),
)
QWEN3 = replace(
    QWEN2,
    kind="qwen3",
    title="a Qwen3",
    architecture="Qwen3ForCausalLM",
    fields=fields(num_key_value_heads=32, max_position_embeddings=32768, head_dim=128),
    fixed={"add_qkv_bias": False, "qk_layernorm": True},
    only={**QWEN2.only, "attention_bias": (False,)},
)

FAMILY = ModelFamily(
    LlamaConfig,
    tiny={
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 40,
    },
    hugging_face=(LLAMA, MISTRAL, MINISTRAL, QWEN2, QWEN3),
)
