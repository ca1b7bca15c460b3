"""Keys, names and conditions that several transformers models share, most of them LLaMA's."""

from typing import Any

from model.hf.family import ConfigKey, KeyGroup, Names, Need
from model.hf.parts import ROPE, rope_from_hf, rope_to_hf

FIELDS = {
    "num_hidden_layers": ConfigKey("num_layers", int),
    "hidden_size": ConfigKey("hidden_size", int),
    "intermediate_size": ConfigKey("ffn_hidden_size", int),
    "num_attention_heads": ConfigKey("num_attention_heads", int),
    "num_key_value_heads": ConfigKey("num_query_groups", int, None),
    "head_dim": ConfigKey("kv_channels", int, None),
    "vocab_size": ConfigKey("vocab_size", int),
    "max_position_embeddings": ConfigKey("max_position_embeddings", int, 2048),
    "rms_norm_eps": ConfigKey("norm_epsilon", float, 1e-6),
    "initializer_range": ConfigKey("init_method_std", float, 0.02),
}


def fields(**defaults: Any) -> dict[str, ConfigKey]:
    """Return LLaMA's fields, with these defaults for keys that a file lacks."""
    changed = {key: FIELDS[key]._replace(default=value) for key, value in defaults.items()}
    return FIELDS | changed


ROPE_GROUP = KeyGroup(ROPE, rope_from_hf, rope_to_hf)
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
"""Longmesh's name -> transformers' name, for norms that follow attention and feed-forward."""
