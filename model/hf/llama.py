"""Transformers' LLaMA, Mistral, Ministral, Qwen2, Qwen3, OLMo 3 and Gemma 3, a table each.

All use half-split rotary pairs and weights [out, in], so only names change.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from model.families.gemma3 import Gemma3Config
from model.families.llama import LlamaConfig
from model.families.olmo3 import Olmo3Config
from model.hf.family import REQUIRED, TOKEN_IDS, Family, Field, Names, Need, Part
from model.hf.parts import (
    ROPE,
    WINDOWS,
    ministral_from_hf,
    qwen_from_hf,
    qwen_to_hf,
    rope_from_hf,
    rope_to_hf,
    ropes_from_hf,
    ropes_to_hf,
    window_from_hf,
    window_to_hf,
    windows_from_hf,
    windows_to_hf,
)

FIELDS = {
    "num_hidden_layers": Field("num_layers", int),
    "hidden_size": Field("hidden_size", int),
    "intermediate_size": Field("ffn_hidden_size", int),
    "num_attention_heads": Field("num_attention_heads", int),
    "num_key_value_heads": Field("num_query_groups", int, None),
    "head_dim": Field("kv_channels", int, None),
    "vocab_size": Field("vocab_size", int),
    "max_position_embeddings": Field("max_position_embeddings", int, 2048),
    "rms_norm_eps": Field("norm_epsilon", float, 1e-6),
    "initializer_range": Field("init_method_std", float, 0.02),
}


def fields(**defaults: Any) -> dict[str, Field]:
    """Return the fields of a LLaMA, some with another value where the key is missing."""
    return {key: one._replace(default=defaults.get(key, one.default)) for key, one in FIELDS.items()}


ROPE_PART = Part(ROPE, rope_from_hf, rope_to_hf)
SMALL_STD = Need("init_method_std", lambda config: config.init_method_std <= 1, "1 at most")
WHOLE_HEADS = Need(
    "hidden_size",
    lambda config: config.hidden_size % config.num_attention_heads == 0,
    "a multiple of num_attention_heads {config.num_attention_heads}",
)
SILU = {"hidden_act": ("silu", "swish"), "attention_bias": (False,)}

LLAMA = Family(
    kind="llama",
    title="a LLaMA",
    architecture="LlamaForCausalLM",
    ours=LlamaConfig,
    fields=FIELDS,
    tied=False,
    parts=(ROPE_PART,),
    own={"add_qkv_bias": False, "qk_layernorm": False},
    only={**SILU, "mlp_bias": (False,), "sliding_window": (None,), "rope_interleaved": (None, False)},
    rates=("attention_dropout",),
    ignored=frozenset({"pretraining_tp", "max_sequence_length", "is_llama_config"}),
    needs=(Need("window_size", lambda config: not any(config.windows), "none"), WHOLE_HEADS, SMALL_STD),
    names=Names(
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
    ),
    # Old checkpoints include the rotary frequencies, which follow from the configuration.
    derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
MISTRAL = replace(
    LLAMA,
    kind="mistral",
    title="a Mistral",
    architecture="MistralForCausalLM",
    fields=fields(num_key_value_heads=8, max_position_embeddings=131072),
    parts=(ROPE_PART, Part(WINDOWS[:1], window_from_hf, window_to_hf)),
    only={"hidden_act": ("silu", "swish"), "attention_bias": (None, False), "mlp_bias": (None, False)},
    ignored=frozenset(),
    needs=(Need("window_attn_skip_freq", lambda config: len(set(config.windows)) == 1, "none"),),
)
MINISTRAL = replace(
    MISTRAL,
    kind="ministral",
    title="a Ministral",
    architecture="MinistralForCausalLM",
    fields=fields(num_key_value_heads=8, max_position_embeddings=131072, head_dim=REQUIRED),
    parts=(ROPE_PART, Part(WINDOWS, ministral_from_hf, windows_to_hf)),
    needs=(Need("window_size", lambda config: any(config.windows), "a width"),),
)
QWEN2 = replace(
    MISTRAL,
    kind="qwen2",
    title="a Qwen2",
    architecture="Qwen2ForCausalLM",
    fields=fields(num_key_value_heads=32, max_position_embeddings=32768),
    parts=(ROPE_PART, Part(("use_sliding_window", "max_window_layers", *WINDOWS), qwen_from_hf, qwen_to_hf)),
    own={"add_qkv_bias": True, "qk_layernorm": False},
    only={**MISTRAL.only, "use_mrope": (None, False)},
    needs=(),
)
QWEN3 = replace(
    QWEN2,
    kind="qwen3",
    title="a Qwen3",
    architecture="Qwen3ForCausalLM",
    fields=fields(num_key_value_heads=32, max_position_embeddings=32768, head_dim=128),
    own={"add_qkv_bias": False, "qk_layernorm": True},
    only={**QWEN2.only, "attention_bias": (False,)},
)

POST_NORMS = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
THETA = 500000.0
OLMO3 = Family(
    kind="olmo3",
    title="an OLMo 3",
    architecture="Olmo3ForCausalLM",
    ours=Olmo3Config,
    fields=fields(rms_norm_eps=1e-5),
    tied=False,
    parts=(
        Part(WINDOWS, partial(windows_from_hf, every=4), windows_to_hf),
        Part(ROPE, partial(ropes_from_hf, bases=(THETA, THETA)), ropes_to_hf),
    ),
    only=SILU,
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    needs=(SMALL_STD,),
    names=LLAMA.names.renamed(POST_NORMS),
)

LOCAL, INTERVAL = "rope_local_base_freq", "sliding_window_pattern"
GEMMA3_NAMES = LLAMA.names.renamed(
    {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
GEMMA3 = Family(
    kind="gemma3_text",
    title="a Gemma 3",
    architecture="Gemma3ForCausalLM",
    ours=Gemma3Config,
    # Published files leave out what is transformers' default.
    fields={
        **fields(
            num_hidden_layers=26,
            hidden_size=2304,
            intermediate_size=9216,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            vocab_size=262208,
            max_position_embeddings=131072,
        ),
        "query_pre_attn_scalar": Field("query_pre_attn_scalar", int, 256),
    },
    tied=True,
    parts=(
        Part((*WINDOWS, INTERVAL), partial(windows_from_hf, every=6, interval=INTERVAL), windows_to_hf),
        Part((*ROPE, LOCAL), partial(ropes_from_hf, bases=(1e6, 1e4), local=LOCAL), partial(ropes_to_hf, local=LOCAL)),
    ),
    only={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
    },
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    ignored=frozenset({"cache_implementation", "_sliding_window_pattern"}),
    needs=(WHOLE_HEADS, SMALL_STD),
    names=GEMMA3_NAMES,
    stored=(GEMMA3_NAMES.under("language_model.model"), GEMMA3_NAMES.under("model.language_model")),
    nested="text_config",
    whole="gemma3",
    skipped=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)
