"""Convert between Hugging Face's LlamaForCausalLM and ours: configurations and state dicts.

Both use half-split rotary pairs and weights [out, in], so only names change.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.hf.folder import entry, shown
from runtime.errors import UserError

# Supported values of the keys of config.json that may ask for something else; a missing key means the first.
# Dropout is not listed: a trained model does not use it.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
UNSAID = {"attention_dropout": 0.0, "max_position_embeddings": 2048}
REPLACED = {"rope_scaling", "partial_rotary_factor"}
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
# Old checkpoints include the rotary frequencies, which follow from the configuration.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
PREFIX = ""


def check(config: ModelConfig) -> None:
    """Raise UserError if LlamaForCausalLM cannot express the model."""
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"hidden_size is {config.hidden_size}, which transformers takes for a LLaMA only as a multiple of "
            f"num_attention_heads {config.num_attention_heads}, whatever kv_channels is; keep it in its checkpoint"
        )
    if config.init_method_std > 1:
        raise UserError(
            f"init_method_std is {config.init_method_std}, and transformers takes 1 at most for a LLaMA; set it lower, "
            "since trained weights do not depend on it"
        )


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from a config.json's contents. Raises KeyError if missing, UserError if unsupported."""
    for key in ("rope_parameters", "rope_scaling"):
        if not _is_plain_rope(hf.get(key)):
            raise UserError(f"config.json: {key} = {shown(hf[key])} is not supported; only unscaled rotation is")
    rope = hf.get("rope_parameters") or {}  # transformers 5 keeps rope_theta in here
    if "rope_theta" not in rope:
        rope = hf
    return ModelConfig(
        model_type="llama",
        num_layers=entry(hf, "num_hidden_layers", int),
        hidden_size=entry(hf, "hidden_size", int),
        ffn_hidden_size=entry(hf, "intermediate_size", int),
        num_attention_heads=entry(hf, "num_attention_heads", int),
        num_query_groups=entry(hf, "num_key_value_heads", int, None),
        kv_channels=entry(hf, "head_dim", int, None),
        vocab_size=entry(hf, "vocab_size", int),
        rotary_base=entry(rope, "rope_theta", float, 10000.0),
        norm_epsilon=entry(hf, "rms_norm_eps", float, 1e-6),
        init_method_std=entry(hf, "initializer_range", float, 0.02),
        untie_embeddings_and_output_weights=not entry(hf, "tie_word_embeddings", bool, False),
    )


def _is_plain_rope(rope: Any) -> bool:
    """Return whether these rope parameters mean unscaled rotation of all channels."""
    if rope is None:
        return True
    if not isinstance(rope, dict):
        return False
    kind = rope.get("rope_type", rope.get("type", "default"))
    plain = kind == "default" or (kind == "linear" and rope.get("factor") == 1)
    return plain and rope.get("partial_rotary_factor", 1.0) == 1.0


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of a config.json, for transformers 4 and 5, that our fields determine."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "rope_theta": float(config.rotary_base),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.rotary_base)},
        "rms_norm_eps": float(config.norm_epsilon),
        "initializer_range": float(config.init_method_std),
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def to_ours(theirs: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return our state dict of `names`, with the same tensors."""
    return {name: theirs[_hf_name(name)] for name in names}


def to_theirs(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return their state dict, with the same tensors."""
    return {_hf_name(name): weight for name, weight in ours.items()}


def _hf_name(name: str) -> str:
    """Return Hugging Face's name of our parameter."""
    module = name.removesuffix(".weight")
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        return f"model.layers.{layer}.{LAYER_NAMES[module]}.weight"
    return f"{TOP_NAMES[module]}.weight"
