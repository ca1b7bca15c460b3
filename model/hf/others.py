"""Models that are no LLaMAs: Hugging Face's GPT-2, and the released TransNormerLLM (OpenNLPLab, 385M, 1B and 7B).

GPT2LMHeadModel has weights [in, out] (its Conv1D), and queries, keys and values in one. Names and layouts of
TransNormerLLM follow modeling_transnormer.py, released with the weights (copyright 2024 OpenNLPLab, Apache-2.0), which
transformers runs with trust_remote_code. Its norms have no weights, and epsilon 1e-6.
"""

from typing import Any

from torch import Tensor

from model.config import DecoderConfig
from model.families.gpt import GPTConfig
from model.families.transnormer import TransnormerConfig
from model.hf.family import Contents, Family, Field, Fused, Names, Need, Part
from model.hf.folder import CONFIG, entry, unsupported
from runtime.errors import UserError

_UNUSED = """
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    summary_last_dropout reorder_and_upcast_attn gradient_checkpointing
    n_special predict_special_tokens output_past
"""
EPSILON = 1e-6
THETA = "layers.0.attention.lrpe.theta"
"""Ours is [H * D], theirs [H, 1, D]."""


def _transposed(config: DecoderConfig, name: str, weight: Tensor) -> Tensor:
    return weight.T.contiguous() if name.startswith("layers.") and weight.ndim == 2 else weight


GPT2 = Family(
    kind="gpt2",
    title="Hugging Face's GPT-2",
    architecture="GPT2LMHeadModel",
    ours=GPTConfig,
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
        ours_of=_transposed,
        theirs_of=_transposed,
    ),
    # Old checkpoints include the causal mask, and those of the bare GPT2Model omit the prefix.
    derived=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    prefix="transformer.",
)


def _from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    ffn, heads, inside = entry(hf, "glu_dim", int), settings["num_attention_heads"], entry(hf, "hidden_dim", int)
    if heads < 1 or inside % heads:
        raise UserError(f"{CONFIG}: hidden_dim is {inside}; it must be a multiple of decoder_attention_heads {heads}")
    layers, lrpe = settings["num_layers"], entry(hf, "linear_use_lrpe_list", list)
    if len(lrpe) != layers or [bool(one) for one in lrpe] != [number == 0 for number in range(len(lrpe))]:
        raise unsupported("linear_use_lrpe_list", lrpe, "; only the first layer has LRPE")
    width = settings["hidden_size"] if ffn == -1 else ffn
    return {"ffn_hidden_size": width, "kv_channels": inside // heads, "norm_epsilon": EPSILON}


def _to_hf(config: DecoderConfig) -> dict[str, Any]:
    lrpe = [int(layer == 0) for layer in range(config.num_layers)]
    inside = config.num_attention_heads * config.head_dim
    return {"hidden_dim": inside, "glu_dim": config.ffn_size, "linear_use_lrpe_list": lrpe}


def _theta_to_theirs(config: DecoderConfig, name: str, weight: Tensor) -> Tensor:
    return weight.view(config.num_attention_heads, 1, config.head_dim) if name == THETA else weight


TRANSNORMER = Family(
    kind="transnormer",
    title="a released TransNormer",
    architecture="TransnormerForCausalLM",
    ours=TransnormerConfig,
    fields={
        "decoder_layers": Field("num_layers", int),
        "decoder_embed_dim": Field("hidden_size", int),
        "decoder_attention_heads": Field("num_attention_heads", int),
        "vocab_size": Field("vocab_size", int),
        "init_std": Field("init_method_std", float, 0.02),
        "no_scale_embedding": Field("no_scale_embedding", bool, False),
    },
    tied=True,
    parts=(Part(("hidden_dim", "glu_dim", "linear_use_lrpe_list"), _from_hf, _to_hf),),
    only={"norm_type": ("simplermsnorm",), "linear_act_fun": ("silu",), "bias": (False,)},
    ignored=frozenset({"add_bos_token"}),
    needs=(
        Need("softmax_every", lambda config: config.softmax_every is None, "linear attention in every layer"),
        Need("linear_decay", lambda config: config.linear_decay in (None, "released"), "released"),
        Need("norm_epsilon", lambda config: config.norm_epsilon == EPSILON, f"{EPSILON}"),
    ),
    names=Names(
        top={"embedding": "model.embed_tokens", "output": "lm_head"},
        layers="model.layers",
        layer={
            "attention.lrpe": "token_mixer.lrpe",
            "attention.wo": "token_mixer.out_proj",
            "mlp.gate": "channel_mixer.l1",
            "mlp.up": "channel_mixer.l2",
            "mlp.down": "channel_mixer.l3",
        },
        fused={"token_mixer.qkvu_proj": Fused(tuple(f"attention.{w}" for w in ("wq", "wk", "wv", "wu")))},
        ours_of=lambda config, name, weight: weight.flatten() if name == THETA else weight,
        theirs_of=_theta_to_theirs,
    ),
    prefix="model.",
)
