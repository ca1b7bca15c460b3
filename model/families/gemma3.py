"""Gemma 3 (arXiv:2503.19786): norms on both sides of each branch, GeGLU, two ropes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.common import NAMES, SMALL_STD, WHOLE_HEADS, fields
from model.hf.family import TOKEN_IDS, ConfigKey, Family, KeyGroup
from model.hf.parts import ROPE, WINDOWS, ropes_from_hf, ropes_to_hf, windows_from_hf, windows_to_hf
from model.parts.attention import HybridAttention
from model.parts.blocks import BothNormsLayer
from model.parts.feed_forward import SwiGLU
from model.parts.norms import ZeroCentredRMSNorm
from model.parts.settings import LocalRopeConfig, RopePositionsConfig


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(LocalRopeConfig, RopePositionsConfig):
    """A Gemma 3: norms on both sides, GeGLU, and a second rope in layers with a window."""

    RESOLVED: ClassVar[Mapping[str, str]] = {"query_pre_attn_scalar": "query_scalar"}

    model_type: str = "gemma3"
    query_pre_attn_scalar: int | None = None
    """Divide a gemma3's attention scores by the square root of this number; by default the width of
    a head."""

    title = "Gemma 3"
    # Large, because the four norms save their inputs in float32.
    footprint = Footprint(fused_residual=13.0, gated=True)

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        attention = self.attention(layer, cores.softmax, qk_norm=self.head_norm)
        assert isinstance(attention.q_norm, ZeroCentredRMSNorm)
        # attend divides scores by sqrt(D); with this factor they are divided by sqrt(query_scalar)
        attention.q_norm.scale = math.sqrt(self.head_dim / self.query_scalar)
        return BothNormsLayer(self.norm, attention, SwiGLU(self.hidden_size, self.ffn_size, "gelu"))

    def norm(self, width: int | None = None) -> nn.Module:
        return ZeroCentredRMSNorm(width or self.hidden_size, eps=self.norm_epsilon)

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Return the factor of the embeddings, rounded to their dtype.

        The released models' code rounds it too, so bfloat16 models were trained with 55.5 instead
        of 55.43, the root of 3072.
        """
        return torch.tensor(math.sqrt(self.hidden_size), dtype=dtype).item()

    def check(self) -> None:
        super().check()
        self.check_counts("query_pre_attn_scalar")

    @property
    def query_scalar(self) -> int:
        return self.query_pre_attn_scalar or self.head_dim

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the scale of scores."""
        return super().architecture() | self.resolved("query_pre_attn_scalar")


LOCAL = "rope_local_base_freq"
INTERVAL = "sliding_window_pattern"
GEMMA3_NAMES = NAMES.renamed(
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
    # These are transformers' defaults; published files leave out keys with these values.
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
        "query_pre_attn_scalar": ConfigKey("query_pre_attn_scalar", int, 256),
    },
    tied=True,
    groups=(
        KeyGroup(
            (*WINDOWS, INTERVAL),
            partial(windows_from_hf, every=6, interval=INTERVAL),
            windows_to_hf,
        ),
        KeyGroup(
            (*ROPE, LOCAL),
            partial(ropes_from_hf, bases=(1e6, 1e4), local=LOCAL),
            partial(ropes_to_hf, local=LOCAL),
        ),
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
    outer="gemma3",
    skipped=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)

FAMILY = ModelFamily(
    Gemma3Config,
    tiny={
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "num_query_groups": 2,
        "kv_channels": 16,
        "query_pre_attn_scalar": 21,
        "window_size": "5,0",
        "window_attn_skip_freq": "2",
        "rotary_base_local": 90.0,
    },
    hugging_face=(GEMMA3,),
)
