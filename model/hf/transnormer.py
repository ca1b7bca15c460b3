"""The released TransNormerLLM checkpoints (OpenNLPLab/TransNormerLLM-385M, -1B, -7B).

Names and layouts follow modeling_transnormer.py, released with the weights (copyright 2024 OpenNLPLab, Apache-2.0),
which transformers runs with trust_remote_code. Its norms have no weights, and epsilon 1e-6.
"""

from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.hf.family import Contents, Family, Field, Fused, Names, Need, Part
from model.hf.folder import CONFIG, entry, unsupported
from runtime.errors import UserError

EPSILON = 1e-6
THETA = "layers.0.attention.lrpe.theta"
"""Ours is [H * D], theirs [H, 1, D]."""


def _from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    ffn, heads, inside = entry(hf, "glu_dim", int), settings["num_attention_heads"], entry(hf, "hidden_dim", int)
    if heads < 1 or inside % heads:
        raise UserError(f"{CONFIG}: hidden_dim is {inside}; it must be a multiple of decoder_attention_heads {heads}")
    layers, lrpe = settings["num_layers"], entry(hf, "linear_use_lrpe_list", list)
    if len(lrpe) != layers or [bool(one) for one in lrpe] != [number == 0 for number in range(len(lrpe))]:
        raise unsupported("linear_use_lrpe_list", lrpe, "; only the first layer has LRPE")
    width = settings["hidden_size"] if ffn == -1 else ffn
    return {"ffn_hidden_size": width, "kv_channels": inside // heads, "norm_epsilon": EPSILON}


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    lrpe = [int(layer == 0) for layer in range(config.num_layers)]
    inside = config.num_attention_heads * config.head_dim
    return {"hidden_dim": inside, "glu_dim": config.ffn_size, "linear_use_lrpe_list": lrpe}


def _theta_to_theirs(config: ModelConfig, name: str, weight: Tensor) -> Tensor:
    return weight.view(config.num_attention_heads, 1, config.head_dim) if name == THETA else weight


TRANSNORMER = Family(
    kind="transnormer",
    title="a released TransNormer",
    architecture="TransnormerForCausalLM",
    ours="transnormer",
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
