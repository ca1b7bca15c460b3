"""TransNormerLLM (Qin et al. 2023, arXiv:2307.14995), with linear attention with decay.

The output of attention is normalised and gated, and the feed-forward gated without an activation,
as its released models compute; the norms have no weights. With softmax_every the model is a hybrid:
every so many-th layer has softmax attention with rope, as every eighth in MiniMax-01 (2025,
arXiv:2501.08313).
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.family import Contents, Family, Field, Fused, Names, Need, Part
from model.hf.folder import CONFIG, entry, unsupported
from model.parts.attention import HybridAttention
from model.parts.blocks import PreNormLayer
from model.parts.feed_forward import SGLU
from model.parts.linear_attention import LinearConfig, TokenMixer, paper_decay, released_decay
from model.parts.norms import RMSNorm
from model.parts.settings import PeriodicConfig, RotaryConfig, WindowedConfig
from runtime.errors import UserError, require


@dataclass(frozen=True, kw_only=True)
class TransnormerConfig(WindowedConfig, RotaryConfig, PeriodicConfig, LinearConfig):
    """A TransNormerLLM: linear attention with decay."""

    model_type: str = "transnormer"
    linear_decay: Literal["released", "paper"] | None = None
    """Decay of a transnormer's heads: as its released models do, the default, or as its paper
    writes."""

    title = "TransNormer"
    positions = "lrpe"
    # LRPE doubles the width of the first layer's queries and keys.
    footprint = Footprint(fused_residual=9.0, gated=True, first_layer=10.0)
    linears = ("wq", "wk", "wv", "wu", "wo", "gate", "up", "down")

    def block(self, layer: int, attends: HybridAttention) -> nn.Module:
        """Build a layer, counted from 0."""
        if self.has_softmax(layer):
            attention: nn.Module = self.attention(layer, attends.softmax)
        else:
            decay = paper_decay if self.linear_decay == "paper" else released_decay
            log_decay = decay(self.num_attention_heads, self.num_layers, layer)
            attention = TokenMixer(self, layer, attends.linear, log_decay)
        return PreNormLayer(self.norm, attention, SGLU(self.hidden_size, self.ffn_size))

    def norm(self, width: int | None = None) -> nn.Module:
        """Build a norm without weights."""
        return RMSNorm(width or self.hidden_size, eps=self.norm_epsilon, elementwise_affine=False)

    def check(self) -> None:
        """Check that rope has layers of softmax attention."""
        super().check()
        must = (
            f"model_type {self.model_type} has LRPE positions, which take no settings; leave it out"
        )
        require(self, self.some_softmax or self.is_default("rotary_base"), "rotary_base", must)

    @property
    def state_elements(self) -> int:
        """Elements of the states of all layers, per sequence; LRPE doubles the first layer's
        keys."""
        state = self.num_attention_heads * self.head_dim**2
        return state * (self.recurrent_layers + (not self.has_softmax(0)))

    def architecture(self) -> Architecture:
        """Return that of ``DecoderConfig``, with the decay."""
        return super().architecture() | {"linear_decay": self.linear_decay or "released"}


EPSILON = 1e-6
THETA = "layers.0.attention.lrpe.theta"
"""Ours is [H * D], theirs [H, 1, D]."""


def _from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    ffn, heads, inside = (
        entry(hf, "glu_dim", int),
        settings["num_attention_heads"],
        entry(hf, "hidden_dim", int),
    )
    if heads < 1 or inside % heads:
        raise UserError(
            f"{CONFIG}: hidden_dim is {inside}; it must be a multiple of decoder_attention_heads {heads}"
        )
    layers, lrpe = settings["num_layers"], entry(hf, "linear_use_lrpe_list", list)
    if len(lrpe) != layers or [bool(one) for one in lrpe] != [
        number == 0 for number in range(len(lrpe))
    ]:
        raise unsupported("linear_use_lrpe_list", lrpe, "; only the first layer has LRPE")
    width = settings["hidden_size"] if ffn == -1 else ffn
    return {"ffn_hidden_size": width, "kv_channels": inside // heads, "norm_epsilon": EPSILON}


def _to_hf(config: TransnormerConfig) -> dict[str, Any]:
    lrpe = [int(layer == 0) for layer in range(config.num_layers)]
    inside = config.num_attention_heads * config.head_dim
    return {"hidden_dim": inside, "glu_dim": config.ffn_size, "linear_use_lrpe_list": lrpe}


def _theta_to_theirs(config: TransnormerConfig, name: str, weight: Tensor) -> Tensor:
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
        Need(
            "softmax_every",
            lambda config: config.softmax_every is None,
            "linear attention in every layer",
        ),
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
        fused={
            "token_mixer.qkvu_proj": Fused(
                tuple(f"attention.{w}" for w in ("wq", "wk", "wv", "wu"))
            )
        },
        ours_of=lambda config, name, weight: weight.flatten() if name == THETA else weight,
        theirs_of=_theta_to_theirs,
    ),
    prefix="model.",
)

FAMILY = ModelFamily(
    TransnormerConfig,
    tiny={"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40},
    hugging_face=(TRANSNORMER,),
)
