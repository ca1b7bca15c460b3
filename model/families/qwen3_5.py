"""Qwen3.5: three of every four layers have a gated delta rule, the others gated attention."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.common import NAMES, SILU, fields
from model.hf.delta import (
    CONVOLUTION,
    KINDS,
    kinds_from_hf,
    kinds_to_hf,
    sizes,
    taps_from_hf,
    taps_to_hf,
)
from model.hf.family import ConfigKey, Family, Fused, KeyGroup
from model.hf.parts import ROPE, rope_from_hf, rope_to_hf
from model.parts.attention import HybridAttention
from model.parts.blocks import PreNormLayer
from model.parts.delta import DeltaAttention, DeltaConfig
from model.parts.feed_forward import SwiGLU
from model.parts.norms import ZeroCentredRMSNorm
from model.parts.settings import RopePositionsConfig, WindowedConfig
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(WindowedConfig, RopePositionsConfig, DeltaConfig):
    """A Qwen3.5: three of every four layers have a gated delta rule."""

    model_type: str = "qwen3_5"
    rotary_percent: float = 1.0
    """Share of a head's channels, counted from the first, that rope rotates in a qwen3_5; 0.25 in
    released models."""

    title = "Qwen3.5"
    # The two norms save their inputs in float32.
    footprint = Footprint(fused_residual=6.0, gated=True, output_gate=2.0, qk_norms=2.0)
    dt_ones = True

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        feed_forward = SwiGLU(self.hidden_size, self.ffn_size)
        if not self.has_softmax(layer):
            delta = DeltaAttention(self, layer, cores.linear)
            return PreNormLayer(self.norm, delta, feed_forward)
        attention = self.attention(layer, cores.softmax, qk_norm=self.head_norm, output_gate=True)
        return PreNormLayer(self.norm, attention, feed_forward)

    def norm(self, width: int | None = None) -> nn.Module:
        return ZeroCentredRMSNorm(width or self.hidden_size, eps=self.norm_epsilon)

    def check_rotated(self) -> None:
        """Check the number of channels that rope rotates."""
        in_range = 0 < self.rotary_percent <= 1
        require(self, in_range, "rotary_percent", "it must be above 0 and at most 1 (all)")

        width = self.rotary_dim
        even = width % 2 == 0 or self.rotary_percent == 1
        must = (
            f"rope would rotate {width} of {self.head_dim} channels; choose a share that gives an "
            "even number above 0"
        )
        require(self, width > 0 and even, "rotary_percent", must)
        if self.rotary_percent == 1:
            super().check_rotated()

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_percent)

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the share of channels that rope rotates."""
        return super().architecture() | {"rotary_percent": self.rotary_percent}


def _rope_to_hf(config: Qwen3_5Config) -> dict[str, Any]:
    """Return rope's entries with the rotated share, because transformers' default is a quarter."""
    return rope_to_hf(config, config.rotary_percent)


QWEN3_5_NAMES = NAMES.renamed(
    {},
    fused={
        # The rows go head by head: a head's queries, then its gate.
        "self_attn.q_proj": Fused(
            ("attention.wq", "attention.wu"), groups=lambda config: int(config.num_attention_heads)
        )
    },
    linear=NAMES.renamed(
        {
            "attention.wu": "linear_attn.in_proj_z",
            "attention.wb": "linear_attn.in_proj_b",
            "attention.wa": "linear_attn.in_proj_a",
            "attention.gates": "linear_attn",
            "attention.out_norm": "linear_attn.norm",
            "attention.wo": "linear_attn.out_proj",
        },
        fused={
            "linear_attn.in_proj_qkv": Fused(
                ("attention.wq", "attention.wk", "attention.wv"), sizes=sizes
            ),
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
        "linear_num_key_heads": ConfigKey("linear_num_key_heads", int, 16),
        "linear_num_value_heads": ConfigKey("linear_num_value_heads", int, 32),
        "linear_key_head_dim": ConfigKey("linear_key_head_dim", int, 128),
        "linear_value_head_dim": ConfigKey("linear_value_head_dim", int, 128),
        "linear_conv_kernel_dim": ConfigKey("linear_conv_kernel_dim", int, 4),
    },
    tied=False,
    groups=(
        KeyGroup(
            ROPE,
            partial(rope_from_hf, share=0.25, others=("mrope_section", "mrope_interleaved")),
            _rope_to_hf,
        ),
        KeyGroup(KINDS, kinds_from_hf, kinds_to_hf),
    ),
    fixed={"linear_gate": "per_head"},
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
    outer="qwen3_5",
    skipped=r"mtp\..*|model\.visual\..*",
)

FAMILY = ModelFamily(
    Qwen3_5Config,
    tiny={
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "num_query_groups": 2,
        "kv_channels": 16,
        "rotary_percent": 0.25,
        "softmax_every": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    hugging_face=(QWEN3_5,),
)
