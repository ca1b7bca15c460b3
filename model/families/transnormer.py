"""TransNormerLLM (Qin et al. 2023, arXiv:2307.14995): linear attention with decay.

As in its released models, the output of attention is normalised and gated, the feed-forward is
gated without an activation, and the norms have no weights. With softmax_every the model is a
hybrid: every N-th layer has softmax attention with rope, like every eighth layer of MiniMax-01
(2025, arXiv:2501.08313).
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.entries import CONFIG, entry, unsupported
from model.hf.family import ConfigKey, Contents, Family, Fused, KeyGroup, Names, Need
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
    """Decay of a transnormer's heads: as in its released models (the default) or as in its
    paper."""

    title = "TransNormer"
    positions = "lrpe"
    # LRPE doubles the width of the first layer's queries and keys.
    footprint = Footprint(fused_residual=9.0, gated=True, first_layer=10.0)
    linears = ("wq", "wk", "wv", "wu", "wo", "gate", "up", "down")

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        if self.has_softmax(layer):
            attention: nn.Module = self.attention(layer, cores.softmax)
        else:
            decay = paper_decay if self.linear_decay == "paper" else released_decay
            log_decay = decay(self.num_attention_heads, self.num_layers, layer)
            attention = TokenMixer(self, layer, cores.linear, log_decay)
        return PreNormLayer(self.norm, attention, SGLU(self.hidden_size, self.ffn_size))

    def norm(self, width: int | None = None) -> nn.Module:
        return RMSNorm(width or self.hidden_size, eps=self.norm_epsilon, elementwise_affine=False)

    def check(self) -> None:
        """Check that rotary_base is set only if some layers have softmax attention."""
        super().check()
        must = (
            f"model_type {self.model_type} has LRPE positions, which have no such setting; leave "
            "rotary_base out, or set softmax_every for layers with rope"
        )
        require(self, self.some_softmax or self.is_default("rotary_base"), "rotary_base", must)

    @property
    def state_elements(self) -> int:
        """Number of elements in the states of all layers, per sequence."""
        layers = self.recurrent_layers
        if not self.has_softmax(0):
            layers += 1  # LRPE doubles the first layer's keys
        return layers * self.num_attention_heads * self.head_dim**2

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the decay."""
        return super().architecture() | {"linear_decay": self.linear_decay or "released"}


EPSILON = 1e-6
THETA = "layers.0.attention.lrpe.theta"
"""Name of LRPE's angles, which are [H * D] in Longmesh but [H, 1, D] in the released models."""


def _from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    ffn_size = entry(hf, "glu_dim", int)
    if ffn_size == -1:
        ffn_size = settings["hidden_size"]
    heads = settings["num_attention_heads"]
    attention_size = entry(hf, "hidden_dim", int)
    if heads < 1 or attention_size % heads:
        raise UserError(
            f"{CONFIG}: hidden_dim is {attention_size}; "
            f"it must be a multiple of decoder_attention_heads {heads}; correct the file"
        )

    lrpe = entry(hf, "linear_use_lrpe_list", list)
    only_first = all(bool(flag) == (layer == 0) for layer, flag in enumerate(lrpe))
    if len(lrpe) != settings["num_layers"] or not only_first:
        raise unsupported(
            "linear_use_lrpe_list", lrpe, "; LRPE must be in the first layer, and in no other"
        )
    return {
        "ffn_hidden_size": ffn_size,
        "kv_channels": attention_size // heads,
        "norm_epsilon": EPSILON,
    }


def _to_hf(config: TransnormerConfig) -> dict[str, Any]:
    return {
        "hidden_dim": config.num_attention_heads * config.head_dim,
        "glu_dim": config.ffn_size,
        "linear_use_lrpe_list": [int(layer == 0) for layer in range(config.num_layers)],
    }


def _theta_to_ours(config: TransnormerConfig, name: str, weight: Tensor) -> Tensor:
    return weight.flatten() if name == THETA else weight


def _theta_to_theirs(config: TransnormerConfig, name: str, weight: Tensor) -> Tensor:
    if name != THETA:
        return weight
    return weight.view(config.num_attention_heads, 1, config.head_dim)


TRANSNORMER = Family(
    kind="transnormer",
    title="a released TransNormer",
    architecture="TransnormerForCausalLM",
    ours=TransnormerConfig,
    fields={
        "decoder_layers": ConfigKey("num_layers", int),
        "decoder_embed_dim": ConfigKey("hidden_size", int),
        "decoder_attention_heads": ConfigKey("num_attention_heads", int),
        "vocab_size": ConfigKey("vocab_size", int),
        "init_std": ConfigKey("init_method_std", float, 0.02),
        "no_scale_embedding": ConfigKey("no_scale_embedding", bool, False),
    },
    tied=True,
    groups=(KeyGroup(("hidden_dim", "glu_dim", "linear_use_lrpe_list"), _from_hf, _to_hf),),
    only={"norm_type": ("simplermsnorm",), "linear_act_fun": ("silu",), "bias": (False,)},
    ignored=frozenset({"add_bos_token"}),
    needs=(
        Need(
            "softmax_every",
            lambda config: config.softmax_every is None,
            "left out, for linear attention in every layer",
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
                ("attention.wq", "attention.wk", "attention.wv", "attention.wu")
            )
        },
        ours_of=_theta_to_ours,
        theirs_of=_theta_to_theirs,
    ),
    prefix="model.",
)

FAMILY = ModelFamily(
    TransnormerConfig,
    tiny={"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40},
    hugging_face=(TRANSNORMER,),
)
