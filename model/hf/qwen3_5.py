"""Transformers' Qwen3_5ForCausalLM, and the text part of a Qwen3_5ForConditionalGeneration: Qwen3.5 to 3.8, dense."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.hf.family import Contents, Family, Field, Fused, Names, Part
from model.hf.folder import CONFIG, entry, shown
from model.hf.llama import FIELDS, LLAMA, ROPE, WHOLE, rope_from_hf, rope_to_hf
from model.traits import EVERY
from runtime.errors import UserError

LINEAR = "linear_attention"
KINDS = ("layer_types", "full_attention_interval")


def kinds_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return our period of softmax attention; layer_types names each layer's kind, or an interval says it."""
    layers, every = min(settings["num_layers"], 10**5), entry(hf, "full_attention_interval", int, EVERY)
    if (kinds := hf.get("layer_types")) is None:
        return {"softmax_every": every}
    every = kinds.index(WHOLE) + 1 if isinstance(kinds, list) and WHOLE in kinds else 0
    if every < 2 or kinds != kinds_of(layers, every):
        raise UserError(
            f"{CONFIG}: layer_types = {shown(kinds)} is not supported; only {WHOLE} in every so many-th of the "
            f"{settings['num_layers']} layers, and {LINEAR} in the others, is"
        )
    return {"softmax_every": every}


def kinds_of(layers: int, every: int) -> list[str]:
    """Return transformers' names of the layers' kinds."""
    return [LINEAR if (layer + 1) % every else WHOLE for layer in range(layers)]


def kinds_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the entries that ``kinds_from_hf`` reads."""
    return {"layer_types": kinds_of(config.num_layers, config.softmax_period or EVERY)}


def taps_from_hf(config: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """Return our vector of a convolution's weight, theirs [channels, 1, taps]; another weight as it is."""
    return weight.flatten() if ".conv_" in name else weight


def taps_to_hf(config: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """Return theirs of ours, which may be joined."""
    return weight.view(-1, 1, config.linear_conv_kernel_dim) if ".conv_" in name else weight


def sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Return the channels of a delta rule's queries, keys and values."""
    keys = config.key_heads * config.key_dim
    return keys, keys, config.value_heads * config.value_dim


CONVOLUTION = Fused(("attention.conv_q", "attention.conv_k", "attention.conv_v"), sizes=sizes)
NAMES = replace(
    LLAMA.names,
    fused={
        "self_attn.q_proj": Fused(
            ("attention.wq", "attention.wu"), groups=lambda config: int(config.num_attention_heads)
        )
    },
    linear=replace(
        LLAMA.names,
        layer={
            **LLAMA.names.layer,
            "attention.wu": "linear_attn.in_proj_z",
            "attention.wb": "linear_attn.in_proj_b",
            "attention.wa": "linear_attn.in_proj_a",
            "attention.gates": "linear_attn",
            "attention.out_norm": "linear_attn.norm",
            "attention.wo": "linear_attn.out_proj",
        },
        fused={
            "linear_attn.in_proj_qkv": Fused(("attention.wq", "attention.wk", "attention.wv"), sizes=sizes),
            "linear_attn.conv1d": CONVOLUTION,
        },
    ),
    ours_of=taps_from_hf,
    theirs_of=taps_to_hf,
)
INSIDE: Names = replace(
    NAMES,
    top={**NAMES.top, "embedding": "model.language_model.embed_tokens", "norm": "model.language_model.norm"},
    layers="model.language_model.layers",
)
"""Names in a model that has a vision part too."""

QWEN3_5 = Family(
    kind="qwen3_5_text",
    title="a Qwen3.5",
    architecture="Qwen3_5ForCausalLM",
    ours="qwen3_5",
    fields={
        **FIELDS,
        "num_key_value_heads": Field("num_query_groups", int, 4),
        "head_dim": Field("kv_channels", int, 256),
        "max_position_embeddings": Field("max_position_embeddings", int, 32768),
        "linear_num_key_heads": Field("linear_num_key_heads", int, 16),
        "linear_num_value_heads": Field("linear_num_value_heads", int, 32),
        "linear_key_head_dim": Field("linear_key_head_dim", int, 128),
        "linear_value_head_dim": Field("linear_value_head_dim", int, 128),
        "linear_conv_kernel_dim": Field("linear_conv_kernel_dim", int, 4),
    },
    tied=False,
    parts=(
        Part(ROPE, partial(rope_from_hf, share=0.25, others=("mrope_section", "mrope_interleaved")), rope_to_hf),
        Part(KINDS, kinds_from_hf, kinds_to_hf),
    ),
    own={"linear_gate": "per_head"},
    only={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "swish", "silu"),
        "mamba_ssm_dtype": (None, "float32"),
        "mlp_only_layers": (None, []),
    },
    rates=("attention_dropout",),
    ignored=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    names=NAMES,
    stored=(INSIDE,),
    nested="text_config",
    whole="qwen3_5",
    skipped=r"mtp\..*|model\.visual\..*",
)
