"""Transformers' OlmoHybridForCausalLM: OLMo Hybrid, without rope."""

from dataclasses import replace
from typing import Any

from model.config import ModelConfig
from model.hf.family import TOKEN_IDS, Contents, Family, Field, Need, Part
from model.hf.folder import CONFIG, entry, shown
from model.hf.llama import FIELDS, LLAMA, ROPE
from model.hf.qwen3_5 import CONVOLUTION, KINDS, kinds_from_hf, kinds_to_hf, taps_from_hf, taps_to_hf
from model.traits import SIZES
from runtime.errors import UserError


def _no_rope(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return nothing. Without a table transformers turns by a base of 10,000; only one of null is none."""
    rope = hf.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_theta", 0) is not None or hf.get("rope_theta") is not None:
        raise UserError(
            f"{CONFIG}: rope_parameters = {shown(rope)} is not supported: transformers turns queries and keys by it, "
            'and here an OLMo Hybrid has no rope, as the released one; only {"rope_theta": null} is'
        )
    return {}


def _sizes_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of layers with a delta rule, by default as transformers has them."""
    heads, width = settings["num_attention_heads"], settings["hidden_size"]
    keys = entry(hf, "linear_num_key_heads", int, None) or heads
    values = entry(hf, "linear_num_value_heads", int, None) or heads
    key_dim = entry(hf, "linear_key_head_dim", int, None) or int(0.75 * width / max(keys, 1))
    value_dim = entry(hf, "linear_value_head_dim", int, None) or 2 * key_dim
    return dict(zip(SIZES, (keys, values, key_dim, value_dim), strict=True))


def _sizes_to_hf(config: ModelConfig) -> dict[str, Any]:
    return dict(zip(SIZES, (config.key_heads, config.value_heads, config.key_dim, config.value_dim), strict=True))


_LINEAR = replace(
    LLAMA.names,
    layer={
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{f"attention.w{one}": f"linear_attn.{one}_proj" for one in "qkvabo"},
        "attention.wu": "linear_attn.g_proj",
        "attention.gates": "linear_attn",
        "attention.out_norm": "linear_attn.o_norm",
        **{f"mlp.{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    },
    fused={"linear_attn.conv1d": CONVOLUTION},
)
NAMES = replace(
    LLAMA.names,
    layer={
        **LLAMA.names.layer,
        "attention_norm": "post_attention_layernorm",
        "mlp_norm": "post_feedforward_layernorm",
    },
    linear=_LINEAR,
    ours_of=taps_from_hf,
    theirs_of=taps_to_hf,
)
RELEASED = replace(
    NAMES,
    linear=replace(
        _LINEAR,
        layer={**_LINEAR.layer, "attention_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"},
    ),
)
"""Names in the released files."""
SAVED = replace(RELEASED, layer={**NAMES.layer, "attention_norm": "feedforward_layer_norm"})
"""Names in files that transformers writes, which turns its module's back in layers of softmax attention too."""

OLMO_HYBRID = Family(
    kind="olmo_hybrid",
    title="an OLMo Hybrid",
    architecture="OlmoHybridForCausalLM",
    ours="olmo_hybrid",
    fields={
        **FIELDS,
        "max_position_embeddings": Field("max_position_embeddings", int, 65536),
        "linear_conv_kernel_dim": Field("linear_conv_kernel_dim", int, 4),
    },
    tied=False,
    parts=(
        Part(ROPE, _no_rope, lambda config: {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
        Part(SIZES, _sizes_from_hf, _sizes_to_hf),
        Part(KINDS[:1], kinds_from_hf, kinds_to_hf),
    ),
    own={"linear_gate": "per_head"},
    only={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "linear_allow_neg_eigval": (True,),
    },
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    ignored=frozenset(f"linear_{one}" for one in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")),
    needs=(Need("init_method_std", lambda config: config.init_method_std <= 1, "1 at most"),),
    names=NAMES,
    stored=(RELEASED, SAVED),
    # Joined, since transformers cuts what it writes into thirds, whatever the widths.
    apart={"linear_attn.conv1d": tuple(f"linear_attn.{one}_conv1d" for one in "qkv")},
    skipped=r"mtp\..*",
)
