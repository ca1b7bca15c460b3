"""Convert between Hugging Face's GPT2LMHeadModel and ours: configurations and state dicts.

Theirs stores weights as [in, out] (its Conv1D) and fuses the query, key and value projections.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.hf.folder import entry
from model.hf.names import Names, Read
from runtime.errors import UserError

# Supported values of the keys of config.json that may ask for something else; a missing key means the first.
# Dropout is not listed: every published GPT-2 sets some, and a trained model does not use it.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # one function under three names
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
UNSAID = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
# Names that theirs accepts as aliases, for n_positions and the like.
REPLACED = {"n_ctx", "max_position_embeddings", "hidden_size", "num_attention_heads", "num_hidden_layers"}
OURS = "gpt"
EMBEDDING = "transformer.wte.weight"
NAMES = Names(
    top={
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layers="transformer.h",
    layer={
        "attention_norm": "ln_1",
        "attention.wo": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    fused="attn.c_attn",
    parts=("attention.wq", "attention.wk", "attention.wv"),
    dim=-1,
)
# Old checkpoints include the causal mask, and those of the bare GPT2Model omit this prefix.
DERIVED = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
PREFIX = "transformer."


def check(config: ModelConfig) -> None:
    """Raise UserError if GPT2LMHeadModel cannot express the model."""
    heads = config.num_attention_heads
    needs = (
        ("position_embedding_type", config.learned_positions, "learned_absolute"),
        ("num_query_groups", config.query_groups == heads, f"num_attention_heads {heads}"),
        ("kv_channels", config.head_dim * heads == config.hidden_size, "hidden_size / num_attention_heads"),
    )
    for name, ok, only in needs:
        if not ok:
            value = getattr(config, name)
            raise UserError(f"{name} is {value}, which Hugging Face's GPT-2 does not have; only {only} can be written")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from a config.json's contents. Raises KeyError if missing, UserError if unsupported."""
    return ModelConfig(
        model_type="gpt",
        num_layers=entry(hf, "n_layer", int),
        hidden_size=entry(hf, "n_embd", int),
        ffn_hidden_size=entry(hf, "n_inner", int, None),
        num_attention_heads=entry(hf, "n_head", int),
        vocab_size=entry(hf, "vocab_size", int),
        position_embedding_type="learned_absolute",
        max_position_embeddings=entry(hf, "n_positions", int),
        norm_epsilon=entry(hf, "layer_norm_epsilon", float, 1e-5),
        init_method_std=entry(hf, "initializer_range", float, 0.02),
        untie_embeddings_and_output_weights=not entry(hf, "tie_word_embeddings", bool, True),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of a config.json, for transformers, that our fields determine."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_size,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "vocab_size": config.vocabulary,
        "layer_norm_epsilon": float(config.norm_epsilon),
        "initializer_range": float(config.init_method_std),
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def to_ours(theirs: Read, names: Iterable[str]) -> dict[str, Tensor]:
    """Return our state dict of `names`: the same tensors where layouts agree, transposed copies elsewhere."""
    return NAMES.to_ours(theirs, names, _turned)


def to_theirs(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return their state dict: the same tensors where layouts agree, copies elsewhere."""
    return NAMES.to_theirs(ours, _turned)


def _turned(name: str, weight: Tensor) -> Tensor:
    return weight.T.contiguous() if name.startswith("layers.") and weight.ndim == 2 else weight
