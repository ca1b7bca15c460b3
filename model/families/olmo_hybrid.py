"""OLMo Hybrid: an OLMo without rope; three of every four layers have a gated delta rule."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from model.config import DELTA_SIZES, Footprint
from model.families.family import ModelFamily
from model.hf.common import NAMES, POST_NORMS, SILU, SMALL_STD, fields
from model.hf.delta import CONVOLUTION, KINDS, kinds_from_hf, kinds_to_hf, taps_from_hf, taps_to_hf
from model.hf.entries import entry, unsupported
from model.hf.family import TOKEN_IDS, ConfigKey, Contents, Family, KeyGroup
from model.hf.parts import ROPE
from model.parts.attention import HybridAttention
from model.parts.blocks import PostNormLayer, PreNormLayer
from model.parts.delta import DeltaAttention, DeltaConfig
from model.parts.feed_forward import SwiGLU
from model.parts.settings import LengthConfig, WindowedConfig


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(WindowedConfig, LengthConfig, DeltaConfig):
    """An OLMo Hybrid: three of every four layers have a gated delta rule; none has rope."""

    model_type: str = "olmo_hybrid"

    title = "OLMo Hybrid"
    positions = "none"
    footprint = Footprint(fused_residual=4.0, gated=True, qk_norms=1.0)
    joint_qk_norm = True
    max_beta = 2.0

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        feed_forward = SwiGLU(self.hidden_size, self.ffn_size)
        if not self.has_softmax(layer):
            delta = DeltaAttention(self, layer, cores.linear)
            return PreNormLayer(self.norm, delta, feed_forward)
        attention = self.attention(layer, cores.softmax, qk_norm=self.joint_norm)
        return PostNormLayer(self.norm, attention, feed_forward)

    @property
    def out_epsilon(self) -> float:
        return 1e-5


def _no_rope_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Check that a config.json has no rope, and return no settings.

    A missing rope_parameters does not mean no rope, because transformers then rotates with base
    10,000. Only a base of null turns rope off.
    """
    rope = hf.get("rope_parameters")
    has_null_base = isinstance(rope, dict) and rope.get("rope_theta", 0) is None
    if not has_null_base or hf.get("rope_theta") is not None:
        rest = (
            ": Longmesh's OLMo Hybrid has no rope, like the released models, but transformers "
            'would rotate queries and keys; the only supported value is {"rope_theta": null}'
        )
        raise unsupported("rope_parameters", rope, rest)
    return {}


def _no_rope_to_hf(config: OlmoHybridConfig) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}


def _sizes_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of layers with a delta rule; a missing size gets transformers' default."""
    heads = settings["num_attention_heads"]
    hidden_size = settings["hidden_size"]
    key_heads = entry(hf, "linear_num_key_heads", int, None) or heads
    value_heads = entry(hf, "linear_num_value_heads", int, None) or heads
    key_dim = entry(hf, "linear_key_head_dim", int, None)
    key_dim = key_dim or int(0.75 * hidden_size / max(key_heads, 1))
    value_dim = entry(hf, "linear_value_head_dim", int, None) or 2 * key_dim
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


def _sizes_to_hf(config: OlmoHybridConfig) -> dict[str, Any]:
    return dict(config.resolved(*DELTA_SIZES))


LINEAR_NAMES = NAMES.renamed(
    {
        "attention.wq": "linear_attn.q_proj",
        "attention.wk": "linear_attn.k_proj",
        "attention.wv": "linear_attn.v_proj",
        "attention.wa": "linear_attn.a_proj",
        "attention.wb": "linear_attn.b_proj",
        "attention.wo": "linear_attn.o_proj",
        "attention.wu": "linear_attn.g_proj",
        "attention.gates": "linear_attn",
        "attention.out_norm": "linear_attn.o_norm",
    },
    fused={"linear_attn.conv1d": CONVOLUTION},
)
HYBRID_NAMES = NAMES.renamed(
    POST_NORMS, linear=LINEAR_NAMES, ours_of=taps_from_hf, theirs_of=taps_to_hf
)
RELEASED = HYBRID_NAMES.renamed(
    {},
    linear=LINEAR_NAMES.renamed(
        {"attention_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}
    ),
)
"""Names of the weights in the released files. In layers with a delta rule, the norms have other
names than in the layers with softmax attention.
"""
SAVED = RELEASED.renamed({"attention_norm": "feedforward_layer_norm"})
"""Names in files that transformers writes; they differ from the released ones, because its renaming
on export is meant for layers with a delta rule, but changes layers of softmax attention too."""
OLMO_HYBRID = Family(
    kind="olmo_hybrid",
    title="an OLMo Hybrid",
    architecture="OlmoHybridForCausalLM",
    ours=OlmoHybridConfig,
    fields={
        **fields(max_position_embeddings=65536),
        "linear_conv_kernel_dim": ConfigKey("linear_conv_kernel_dim", int, 4),
    },
    tied=False,
    groups=(
        KeyGroup(ROPE, _no_rope_from_hf, _no_rope_to_hf),
        KeyGroup(tuple(DELTA_SIZES), _sizes_from_hf, _sizes_to_hf),
        KeyGroup(KINDS[:1], kinds_from_hf, kinds_to_hf),
    ),
    fixed={"linear_gate": "per_head"},
    only={**SILU, "linear_allow_neg_eigval": (True,)},
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    ignored=frozenset(
        {
            "linear_a_log_min",
            "linear_a_log_max",
            "linear_dt_min",
            "linear_dt_max",
            "linear_dt_init_floor",
        }
    ),
    needs=(SMALL_STD,),
    names=HYBRID_NAMES,
    stored=(RELEASED, SAVED),
    # These parts are concatenated on reading before they are split by width, because transformers
    # writes three equal parts, whatever the widths of q, k and v.
    split={
        "linear_attn.conv1d": (
            "linear_attn.q_conv1d",
            "linear_attn.k_conv1d",
            "linear_attn.v_conv1d",
        )
    },
    skipped=r"mtp\..*",
)

FAMILY = ModelFamily(
    OlmoHybridConfig,
    tiny={
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "num_query_groups": 2,
        "softmax_every": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 12,
    },
    hugging_face=(OLMO_HYBRID,),
)
