"""Convert the released TransNormerLLM checkpoints (OpenNLPLab/TransNormerLLM-385M, -1B, -7B).

Names and layouts follow modeling_transnormer.py, released with the weights (copyright 2024 OpenNLPLab, Apache-2.0),
which transformers runs with trust_remote_code. Its norms have no weights, and epsilon 1e-6.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.hf.folder import entry, shown
from model.hf.names import Names, Read
from runtime.errors import UserError

# Supported values of the keys of config.json that may ask for something else; a missing key means the first.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("transnormer",),
    "norm_type": ("simplermsnorm",),
    "linear_act_fun": ("silu",),
    "bias": (False,),
}
UNSAID: dict[str, Any] = {}
REPLACED: set[str] = set()
OURS = "transnormer"
EPSILON = 1e-6
EMBEDDING = "model.embed_tokens.weight"
NAMES = Names(
    top={"embedding": "model.embed_tokens", "output": "lm_head"},
    layers="model.layers",
    layer={
        "attention.lrpe": "token_mixer.lrpe",
        "attention.wo": "token_mixer.out_proj",
        "mlp.gate": "channel_mixer.l1",
        "mlp.up": "channel_mixer.l2",
        "mlp.down": "channel_mixer.l3",
    },
    fused="token_mixer.qkvu_proj",
    parts=("attention.wq", "attention.wk", "attention.wv", "attention.wu"),
)
THETA = "layers.0.attention.lrpe.theta"
"""Ours is [H * D], theirs [H, 1, D]."""
DERIVED = re.compile(r"(?!)")  # matches nothing
PREFIX = "model."


def check(config: ModelConfig) -> None:
    """Raise UserError if the released code cannot express the model."""
    if config.softmax_every is not None:
        raise UserError(
            f"softmax_every is {config.softmax_every}, and a released TransNormer has linear attention in every layer: "
            "its code has no layers of softmax attention to read a hybrid into; keep it in its checkpoint"
        )
    needs = (
        ("linear_decay", config.linear_decay or "released", "released"),
        ("norm_epsilon", config.norm_epsilon, EPSILON),
    )
    for name, value, only in needs:
        if value != only:
            raise UserError(
                f"{name} is {value}, which a released TransNormer does not have; only {only} can be written"
            )


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from a config.json's contents. Raises KeyError if missing, UserError if unsupported."""
    layers, lrpe = entry(hf, "decoder_layers", int), entry(hf, "linear_use_lrpe_list", list)
    if len(lrpe) != layers or [bool(one) for one in lrpe] != [number == 0 for number in range(len(lrpe))]:
        raise UserError(
            f"config.json: linear_use_lrpe_list = {shown(lrpe)} is not supported; only the first layer has LRPE"
        )
    ffn, width = entry(hf, "glu_dim", int), entry(hf, "decoder_embed_dim", int)
    heads, inside = entry(hf, "decoder_attention_heads", int), entry(hf, "hidden_dim", int)
    if heads < 1 or inside % heads:
        raise UserError(
            f"config.json: hidden_dim is {inside}; it must be a multiple of decoder_attention_heads {heads}"
        )
    return ModelConfig(
        model_type="transnormer",
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=width if ffn == -1 else ffn,
        num_attention_heads=heads,
        kv_channels=inside // heads,
        vocab_size=entry(hf, "vocab_size", int),
        norm_epsilon=EPSILON,
        init_method_std=entry(hf, "init_std", float, 0.02),
        no_scale_embedding=entry(hf, "no_scale_embedding", bool, False),
        untie_embeddings_and_output_weights=not entry(hf, "tie_word_embeddings", bool, True),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of a config.json, for the released code, that our fields determine; none is a length."""
    return {
        "architectures": ["TransnormerForCausalLM"],
        "decoder_layers": config.num_layers,
        "decoder_embed_dim": config.hidden_size,
        "decoder_attention_heads": config.num_attention_heads,
        "hidden_dim": config.num_attention_heads * config.head_dim,
        "glu_dim": config.ffn_size,
        "linear_use_lrpe_list": [int(layer == 0) for layer in range(config.num_layers)],
        "vocab_size": config.vocabulary,
        "no_scale_embedding": config.no_scale_embedding,
        "init_std": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def to_ours(theirs: Read, names: Iterable[str]) -> dict[str, Tensor]:
    """Return our state dict of `names`, with the same tensors or views of them."""
    return NAMES.to_ours(theirs, names, lambda name, weight: weight.flatten() if name == THETA else weight)


def to_theirs(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return their state dict: the same tensors, but with the projections fused."""
    shape = config.num_attention_heads, 1, config.head_dim
    return NAMES.to_theirs(ours, lambda name, weight: weight.view(shape) if name == THETA else weight)
