"""Hugging Face's GPT2LMHeadModel: weights are [in, out] (its Conv1D), queries, keys and values in one."""

from torch import Tensor

from model.config import ModelConfig
from model.hf.family import Family, Field, Fused, Names, Need, Part

_UNUSED = """
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    summary_last_dropout reorder_and_upcast_attn gradient_checkpointing
    n_special predict_special_tokens output_past
"""


def _turned(config: ModelConfig, name: str, weight: Tensor) -> Tensor:
    return weight.T.contiguous() if name.startswith("layers.") and weight.ndim == 2 else weight


GPT2 = Family(
    kind="gpt2",
    title="Hugging Face's GPT-2",
    architecture="GPT2LMHeadModel",
    ours="gpt",
    fields={
        "n_layer": Field("num_layers", int),
        "n_embd": Field("hidden_size", int),
        "n_inner": Field("ffn_hidden_size", int, None),
        "n_head": Field("num_attention_heads", int),
        "n_positions": Field("max_position_embeddings", int),
        "vocab_size": Field("vocab_size", int),
        "layer_norm_epsilon": Field("norm_epsilon", float, 1e-5),
        "initializer_range": Field("init_method_std", float, 0.02),
    },
    tied=True,
    parts=(Part(("n_ctx",), lambda hf, settings: {}, lambda config: {}),),  # of old files, beside n_positions
    own={"position_embedding_type": "learned_absolute"},
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # one function under three names
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    rates=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ignored=frozenset(_UNUSED.split()),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    needs=(
        Need(
            "num_query_groups",
            lambda config: config.query_groups == config.num_attention_heads,
            "num_attention_heads {config.num_attention_heads}",
        ),
        Need(
            "kv_channels",
            lambda config: config.head_dim * config.num_attention_heads == config.hidden_size,
            "hidden_size / num_attention_heads",
        ),
    ),
    names=Names(
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
        fused={"attn.c_attn": Fused(("attention.wq", "attention.wk", "attention.wv"), dim=-1)},
        ours_of=_turned,
        theirs_of=_turned,
    ),
    # Old checkpoints include the causal mask, and those of the bare GPT2Model omit the prefix.
    derived=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    prefix="transformer.",
)
