"""OLMo 3 (arXiv:2512.13961): norms after each branch, joint query and key norms, two ropes."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from model.config import Footprint
from model.families.family import ModelFamily
from model.hf.common import NAMES, POST_NORMS, SILU, SMALL_STD, fields
from model.hf.family import TOKEN_IDS, Family, KeyGroup
from model.hf.parts import ROPE, WINDOWS, ropes_from_hf, ropes_to_hf, windows_from_hf, windows_to_hf
from model.parts.attention import HybridAttention
from model.parts.blocks import PostNormLayer
from model.parts.feed_forward import SwiGLU
from model.parts.settings import LocalRopeConfig, RopePositionsConfig


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(LocalRopeConfig, RopePositionsConfig):
    """An OLMo 3: norms after each branch, and a second rope in layers with a window."""

    model_type: str = "olmo3"

    title = "OLMo 3"
    # This number includes the inputs of the query and key norms.
    footprint = Footprint(fused_residual=5.0, gated=True)
    joint_qk_norm = True

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        attention = self.attention(layer, cores.softmax, qk_norm=self.joint_norm)
        return PostNormLayer(self.norm, attention, SwiGLU(self.hidden_size, self.ffn_size))


THETA = 500000.0
OLMO3 = Family(
    kind="olmo3",
    title="an OLMo 3",
    architecture="Olmo3ForCausalLM",
    ours=Olmo3Config,
    fields=fields(rms_norm_eps=1e-5),
    tied=False,
    groups=(
        KeyGroup(WINDOWS, partial(windows_from_hf, every=4), windows_to_hf),
        KeyGroup(ROPE, partial(ropes_from_hf, bases=(THETA, THETA)), ropes_to_hf),
    ),
    only=SILU,
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    needs=(SMALL_STD,),
    names=NAMES.renamed(POST_NORMS),
)

FAMILY = ModelFamily(
    Olmo3Config,
    tiny={
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "num_query_groups": 2,
        "window_size": "5,0",
        "window_attn_skip_freq": "2",
        "rotary_base_local": 90.0,
    },
    hugging_face=(OLMO3,),
)
