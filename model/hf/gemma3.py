"""Transformers' Gemma3ForCausalLM, and the text part of a Gemma3ForConditionalGeneration."""

from dataclasses import replace
from functools import partial

from model.hf.family import TOKEN_IDS, Family, Field, Names, Part
from model.hf.llama import FIELDS, LLAMA, ROPE, windows_to_hf
from model.hf.olmo3 import kinds_from_hf, ropes_from_hf, ropes_to_hf

LOCAL, INTERVAL = "rope_local_base_freq", "sliding_window_pattern"
NAMES = replace(
    LLAMA.names,
    layer={
        **LLAMA.names.layer,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)


def _inside(root: str) -> Names:
    """Return the names in a model that has a vision part too."""
    top = {**NAMES.top, "embedding": f"{root}.embed_tokens", "norm": f"{root}.norm"}
    return replace(NAMES, top=top, layers=f"{root}.layers")


GEMMA3 = Family(
    kind="gemma3_text",
    title="a Gemma 3",
    architecture="Gemma3ForCausalLM",
    ours="gemma3",
    # Published files leave out what is transformers' default.
    fields={
        "num_hidden_layers": Field("num_layers", int, 26),
        "hidden_size": Field("hidden_size", int, 2304),
        "intermediate_size": Field("ffn_hidden_size", int, 9216),
        "num_attention_heads": Field("num_attention_heads", int, 8),
        "num_key_value_heads": Field("num_query_groups", int, 4),
        "head_dim": Field("kv_channels", int, 256),
        "query_pre_attn_scalar": Field("query_pre_attn_scalar", int, 256),
        "vocab_size": Field("vocab_size", int, 262208),
        "max_position_embeddings": Field("max_position_embeddings", int, 131072),
        "rms_norm_eps": FIELDS["rms_norm_eps"],
        "initializer_range": FIELDS["initializer_range"],
    },
    tied=True,
    parts=(
        Part(
            ("sliding_window", "layer_types", INTERVAL),
            partial(kinds_from_hf, every=6, interval=INTERVAL),
            windows_to_hf,
        ),
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
    needs=LLAMA.needs[1:],
    names=NAMES,
    stored=(_inside("language_model.model"), _inside("model.language_model")),
    nested="text_config",
    whole="gemma3",
    skipped=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)
