"""Convert between Hugging Face's GPT2LMHeadModel and ours: configurations and state dicts.

Theirs stores weights as [in, out] (its Conv1D) and fuses the query, key and value projections.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hf.folder import entry
from runtime.errors import UserError

# Supported values of the keys of config.json that may ask for something else; a missing key means the first.
# Dropout is not listed: every published GPT-2 sets some, and a trained model does not use it.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # one function under three names
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
UNSAID = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
# Names that theirs accepts as aliases, for n_positions and the like.
REPLACED = {"n_ctx", "max_position_embeddings", "hidden_size", "num_attention_heads", "num_hidden_layers"}
OURS = "gpt"
EMBEDDING = "transformer.wte.weight"
TOP_NAMES = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attention_norm": "ln_1",
    "attention.wo": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
FUSED, PARTS = "attn.c_attn", ("attention.wq", "attention.wk", "attention.wv")
# Old checkpoints include the causal mask, and those of the bare GPT2Model omit this prefix.
DERIVED = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
PREFIX = "transformer."


def check(config: ModelConfig) -> None:
    """Raise UserError if GPT2LMHeadModel cannot express the model."""
    needs = (
        ("position_embedding_type", config.position_embedding_type, config.learned_positions, "learned_absolute"),
        (
            "num_query_groups",
            config.num_query_groups,
            config.query_groups == config.num_attention_heads,
            f"num_attention_heads {config.num_attention_heads}",
        ),
        (
            "kv_channels",
            config.kv_channels,
            config.head_dim * config.num_attention_heads == config.hidden_size,
            "hidden_size / num_attention_heads",
        ),
    )
    for name, value, ok, only in needs:
        if not ok:
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


def to_ours(theirs: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return our state dict of `names`: the same tensors where layouts agree, transposed copies elsewhere."""
    ours = {}
    for name in names:
        module, kind = name.rsplit(".", 1)
        if not module.startswith("layers."):
            ours[name] = theirs[f"{TOP_NAMES[module]}.{kind}"]
            continue
        _, layer, module = module.split(".", 2)
        part = PARTS.index(module) if module in PARTS else None
        inside = FUSED if part is not None else LAYER_NAMES[module]
        weight = theirs[f"transformer.h.{layer}.{inside}.{kind}"]  # [out], [in, out]; fused [3 * out], [in, 3 * out]
        if part is not None:
            weight = weight.chunk(3, dim=-1)[part]
        ours[name] = weight.T.contiguous() if weight.ndim == 2 else weight
    return ours


def to_theirs(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return their state dict: the same tensors where layouts agree, copies elsewhere."""
    theirs = {}
    for name, weight in ours.items():
        module, kind = name.rsplit(".", 1)
        if not module.startswith("layers."):
            theirs[f"{TOP_NAMES[module]}.{kind}"] = weight
            continue
        _, layer, module = module.split(".", 2)
        if module in PARTS[1:]:
            continue
        inside = LAYER_NAMES.get(module, FUSED)
        if inside == FUSED:
            weight = torch.cat([ours[f"layers.{layer}.{part}.{kind}"] for part in PARTS])  # [3 * out, in] or [3 * out]
        theirs[f"transformer.h.{layer}.{inside}.{kind}"] = weight.T.contiguous() if weight.ndim == 2 else weight
    return theirs
