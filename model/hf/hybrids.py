"""Transformers' Qwen3.5 to 3.8, dense, alone or as the text part of a model with vision, and OLMo Hybrid.

Layers of a gated delta rule lie between those of softmax attention, and have names of their own.
"""

from functools import partial
from typing import Any

from torch import Tensor

from model.config import DELTA_SIZES, DecoderConfig
from model.families.olmo_hybrid import OlmoHybridConfig
from model.families.qwen3_5 import Qwen3_5Config
from model.hf.family import TOKEN_IDS, Contents, Family, Field, Fused, Part
from model.hf.folder import entry, unsupported
from model.hf.llama import LLAMA, POST_NORMS, SILU, SMALL_STD, fields
from model.hf.parts import LISTED, ROPE, WHOLE, rope_from_hf, rope_to_hf
from model.parts.settings import DeltaConfig

LINEAR = "linear_attention"
KINDS = ("layer_types", "full_attention_interval")


def kinds_of(layers: int, every: int) -> list[str]:
    """Return transformers' names of the layers' kinds."""
    return [LINEAR if (layer + 1) % every else WHOLE for layer in range(layers)]


def kinds_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return our period of softmax attention; layer_types names each layer's kind, or an interval says it."""
    layers, every = (
        min(settings["num_layers"], LISTED),
        entry(hf, "full_attention_interval", int, DeltaConfig.default_period),
    )
    if (kinds := hf.get("layer_types")) is None:
        return {"softmax_every": every}
    every = kinds.index(WHOLE) + 1 if isinstance(kinds, list) and WHOLE in kinds else 0
    if every < 2 or kinds != kinds_of(layers, every):
        only = f"{WHOLE} in every so many-th of the {settings['num_layers']} layers, and {LINEAR} in the others, is"
        raise unsupported("layer_types", kinds, f"; only {only}")
    return {"softmax_every": every}


def kinds_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the entries that ``kinds_from_hf`` reads."""
    return {"layer_types": kinds_of(config.num_layers, config.softmax_period or 1)}


def taps_from_hf(config: DecoderConfig, name: str, weight: Tensor) -> Tensor:
    """Return our vector of a convolution's weight, theirs [channels, 1, taps]; another weight as it is."""
    return weight.flatten() if ".conv_" in name else weight


def taps_to_hf(config: DeltaConfig, name: str, weight: Tensor) -> Tensor:
    """Return theirs of ours, which may be joined."""
    return weight.view(-1, 1, config.linear_conv_kernel_dim) if ".conv_" in name else weight


def sizes(config: DeltaConfig) -> tuple[int, int, int]:
    """Return the channels of a delta rule's queries, keys and values."""
    keys = config.key_heads * config.key_dim
    return keys, keys, config.value_heads * config.value_dim


CONVOLUTION = Fused(("attention.conv_q", "attention.conv_k", "attention.conv_v"), sizes=sizes)
QWEN3_5_NAMES = LLAMA.names.renamed(
    {},
    fused={
        "self_attn.q_proj": Fused(
            ("attention.wq", "attention.wu"), groups=lambda config: int(config.num_attention_heads)
        )
    },
    linear=LLAMA.names.renamed(
        {
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
QWEN3_5 = Family(
    kind="qwen3_5_text",
    title="a Qwen3.5",
    architecture="Qwen3_5ForCausalLM",
    ours=Qwen3_5Config,
    fields={
        **fields(num_key_value_heads=4, head_dim=256, max_position_embeddings=32768),
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
        **SILU,
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "swish", "silu"),
        "mamba_ssm_dtype": (None, "float32"),
        "mlp_only_layers": (None, []),
    },
    rates=("attention_dropout",),
    ignored=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    names=QWEN3_5_NAMES,
    stored=(QWEN3_5_NAMES.under("model.language_model"),),
    nested="text_config",
    whole="qwen3_5",
    skipped=r"mtp\..*|model\.visual\..*",
)


def _no_rope(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return nothing. Without a table transformers turns by a base of 10,000; only one of null is none."""
    rope = hf.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_theta", 0) is not None or hf.get("rope_theta") is not None:
        rest = (
            ": transformers turns queries and keys by it, and here an OLMo Hybrid has no rope, as the released one; "
            'only {"rope_theta": null} is'
        )
        raise unsupported("rope_parameters", rope, rest)
    return {}


def _sizes_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of layers with a delta rule, by default as transformers has them."""
    heads, width = settings["num_attention_heads"], settings["hidden_size"]
    keys = entry(hf, "linear_num_key_heads", int, None) or heads
    values = entry(hf, "linear_num_value_heads", int, None) or heads
    key_dim = entry(hf, "linear_key_head_dim", int, None) or int(0.75 * width / max(keys, 1))
    value_dim = entry(hf, "linear_value_head_dim", int, None) or 2 * key_dim
    return dict(zip(DELTA_SIZES, (keys, values, key_dim, value_dim), strict=True))


def _sizes_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return dict(config.resolved(*DELTA_SIZES))


LINEAR_NAMES = LLAMA.names.renamed(
    {
        **{f"attention.w{one}": f"linear_attn.{one}_proj" for one in "qkvabo"},
        "attention.wu": "linear_attn.g_proj",
        "attention.gates": "linear_attn",
        "attention.out_norm": "linear_attn.o_norm",
    },
    fused={"linear_attn.conv1d": CONVOLUTION},
)
HYBRID_NAMES = LLAMA.names.renamed(POST_NORMS, linear=LINEAR_NAMES, ours_of=taps_from_hf, theirs_of=taps_to_hf)
RELEASED = HYBRID_NAMES.renamed(
    {},
    linear=LINEAR_NAMES.renamed({"attention_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}),
)
"""Names in the released files."""
SAVED = RELEASED.renamed({"attention_norm": "feedforward_layer_norm"})
"""Names in files that transformers writes, which turns its module's back in layers of softmax attention too."""
OLMO_HYBRID = Family(
    kind="olmo_hybrid",
    title="an OLMo Hybrid",
    architecture="OlmoHybridForCausalLM",
    ours=OlmoHybridConfig,
    fields={
        **fields(max_position_embeddings=65536),
        "linear_conv_kernel_dim": Field("linear_conv_kernel_dim", int, 4),
    },
    tied=False,
    parts=(
        Part(ROPE, _no_rope, lambda config: {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
        Part(tuple(DELTA_SIZES), _sizes_from_hf, _sizes_to_hf),
        Part(KINDS[:1], kinds_from_hf, kinds_to_hf),
    ),
    own={"linear_gate": "per_head"},
    only={**SILU, "linear_allow_neg_eigval": (True,)},
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    ignored=frozenset(f"linear_{one}" for one in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")),
    needs=(SMALL_STD,),
    names=HYBRID_NAMES,
    stored=(RELEASED, SAVED),
    # Joined, since transformers cuts what it writes into thirds, whatever the widths.
    apart={"linear_attn.conv1d": tuple(f"linear_attn.{one}_conv1d" for one in "qkv")},
    skipped=r"mtp\..*",
)
