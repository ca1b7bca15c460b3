"""Keys, names and refusals that several of Hugging Face's families share, most of them LLaMA's."""

from typing import Any

from model.hf.family import Field, Names, Need, Part
from model.hf.parts import ROPE, rope_from_hf, rope_to_hf

FIELDS = {
    "num_hidden_layers": Field("num_layers", int),
    "hidden_size": Field("hidden_size", int),
    "intermediate_size": Field("ffn_hidden_size", int),
    "num_attention_heads": Field("num_attention_heads", int),
    "num_key_value_heads": Field("num_query_groups", int, None),
    "head_dim": Field("kv_channels", int, None),
    "vocab_size": Field("vocab_size", int),
    "max_position_embeddings": Field("max_position_embeddings", int, 2048),
    "rms_norm_eps": Field("norm_epsilon", float, 1e-6),
    "initializer_range": Field("init_method_std", float, 0.02),
}


def fields(**defaults: Any) -> dict[str, Field]:
    """Return LLaMA's fields, some with another value where the key is missing."""
    return {
        key: one._replace(default=defaults.get(key, one.default)) for key, one in FIELDS.items()
    }


ROPE_PART = Part(ROPE, rope_from_hf, rope_to_hf)
SMALL_STD = Need("init_method_std", lambda config: config.init_method_std <= 1, "1 at most")
WHOLE_HEADS = Need(
    "hidden_size",
    lambda config: config.hidden_size % config.num_attention_heads == 0,
    "a multiple of num_attention_heads {config.num_attention_heads}",
)
SILU = {"hidden_act": ("silu", "swish"), "attention_bias": (False,)}
NAMES = Names(
    top={"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    layers="model.layers",
    layer={
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
POST_NORMS = {
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
"""Names of norms after attention and feed-forward."""
