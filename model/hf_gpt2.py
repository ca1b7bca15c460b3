"""Hugging Face's GPT2LMHeadModel <-> ours: configurations and state dicts.

Theirs keeps weights as [in, out] (its Conv1D) and the query, key and value projections side by side in one.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig

# What our model computes, for the keys of config.json that could ask for something else; a missing key means this.
# Dropout is not among them: every published GPT-2 names some, and it is no part of what the trained model computes.
SUPPORTED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}
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
# Old checkpoints carry the causal mask, and those of the bare GPT2Model leave this prefix out.
DERIVED = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
PREFIX = "transformer."


def check(config: ModelConfig) -> None:
    """ValueError where theirs has no such GPT."""
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
            raise ValueError(f"{name} is {value}, which Hugging Face's GPT-2 does not have; only {only} can be written")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json's contents; KeyError for what is missing, ValueError for what is not supported."""
    return ModelConfig(
        model_type="gpt",
        num_layers=hf["n_layer"],
        hidden_size=hf["n_embd"],
        ffn_hidden_size=hf.get("n_inner"),
        num_attention_heads=hf["n_head"],
        vocab_size=hf["vocab_size"],
        position_embedding_type="learned_absolute",
        max_position_embeddings=hf["n_positions"],
        norm_epsilon=hf.get("layer_norm_epsilon", 1e-5),
        init_method_std=hf.get("initializer_range", 0.02),
        untie_embeddings_and_output_weights=not hf.get("tie_word_embeddings", True),
    )


def config_to_hf(config: ModelConfig, max_position_embeddings: int | None) -> dict[str, Any]:
    """The contents of a config.json that transformers reads as the same model.

    ValueError for a length that is not that of the table of positions.
    """
    table = config.max_position_embeddings
    if max_position_embeddings not in (None, table):
        raise ValueError(
            f"max_position_embeddings is {max_position_embeddings} and the model's table of positions has {table} "
            "entries; leave it out"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_size,
        "n_head": config.num_attention_heads,
        "n_positions": table,
        "vocab_size": config.vocabulary,
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        # Theirs defaults to GPT-2's own end of text, which another vocabulary may not have.
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }


def to_ours(theirs: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Our state dict of `names`: the same tensors where the layouts agree, copies of their transposes elsewhere."""
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
    """Their state dict: the same tensors where the layouts agree, copies elsewhere."""
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
