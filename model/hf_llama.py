"""Hugging Face's LlamaForCausalLM <-> ours: configurations and state dicts.

Both keep rotary pairs in the half-split convention and weights as [out, in], so that only names change.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from model.config import ModelConfig

# What our model computes, for the keys of config.json that could ask for something else; a missing key means this.
SUPPORTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
EMBEDDING = "model.embed_tokens.weight"
TOP_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Old checkpoints carry the rotary frequencies, which follow from the configuration.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
PREFIX = ""


def check(config: ModelConfig) -> None:
    """Every LLaMA of ours is one of theirs."""


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json's contents; KeyError for what is missing, ValueError for what is not supported."""
    for key in ("rope_parameters", "rope_scaling"):
        if not _is_plain_rope(hf.get(key)):
            raise ValueError(f"config.json: {key} = {hf[key]!r} is not supported; only unscaled rotation is")
    rope = hf.get("rope_parameters") or {}  # transformers 5 keeps rope_theta in here
    return ModelConfig(
        model_type="llama",
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf.get("num_key_value_heads"),
        kv_channels=hf.get("head_dim"),
        vocab_size=hf["vocab_size"],
        rotary_base=rope.get("rope_theta") or hf.get("rope_theta", 10000.0),
        norm_epsilon=hf.get("rms_norm_eps", 1e-6),
        init_method_std=hf.get("initializer_range", 0.02),
        untie_embeddings_and_output_weights=not hf.get("tie_word_embeddings", False),
    )


def _is_plain_rope(rope: Any) -> bool:
    """Whether these rope parameters ask for nothing beyond the unscaled rotation of all channels."""
    if rope is None:
        return True
    kind = rope.get("rope_type", rope.get("type", "default"))
    return kind == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0


def config_to_hf(config: ModelConfig, max_position_embeddings: int | None) -> dict[str, Any]:
    """The contents of a config.json that transformers 4 and 5 read as the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": max_position_embeddings or 2048,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rms_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def to_ours(theirs: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Our state dict of `names`, holding the same tensors."""
    return {name: theirs[_hf_name(name)] for name in names}


def to_theirs(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their state dict, holding the same tensors."""
    return {_hf_name(name): weight for name, weight in ours.items()}


def _hf_name(name: str) -> str:
    """Hugging Face's name of our parameter."""
    module = name.removesuffix(".weight")
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        return f"model.layers.{layer}.{LAYER_NAMES[module]}.weight"
    return f"{TOP_NAMES[module]}.weight"
