"""Granite 3 (IBM, October 2024), dense: a LLaMA with four factors.

Embeddings, scores, residuals and logits are multiplied by constants, as in muP (arXiv:2203.03466),
so that hyperparameters tuned on a small model hold for a large one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernels.cache import States
from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.common import NAMES, ROPE_GROUP, SILU, fields
from model.hf.family import ConfigKey, Family, Need
from model.parts.attention import HybridAttention
from model.parts.blocks import PreNormLayer
from model.parts.feed_forward import SwiGLU
from model.parts.settings import RopePositionsConfig, WindowedConfig
from runtime.errors import require

FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(WindowedConfig, RopePositionsConfig):
    """A Granite 3: a LLaMA with factors for embeddings, scores, residuals and logits."""

    RESOLVED: ClassVar[Mapping[str, str]] = {"attention_multiplier": "score_scale"}

    model_type: str = "granite"
    embedding_multiplier: float = 1.0
    """Factor by which the embeddings are multiplied."""
    attention_multiplier: float | None = None
    """Factor of the attention scores; by default 1 / sqrt(width of a head)."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and feed-forward before they are added to the residual
    stream."""
    logits_scaling: float = 1.0
    """Divisor of the logits."""

    title = "Granite 3"
    footprint = Footprint(fused_residual=4.0, gated=True)

    def check(self) -> None:
        super().check()
        for name in FACTORS:
            value = getattr(self, name)
            in_range = value is None or 0 < value < math.inf
            require(self, in_range, name, "it must be a number above 0")

    @property
    def score_scale(self) -> float:
        return self.attention_multiplier or self.head_dim**-0.5

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        query_scale = 1.0
        if self.attention_multiplier is not None:  # the root cancels attend's 1 / sqrt(D)
            query_scale = self.attention_multiplier * math.sqrt(self.head_dim)
        attention = self.attention(layer, cores.softmax, query_scale=query_scale)
        return ScaledLayer(self, attention, SwiGLU(self.hidden_size, self.ffn_size))

    def embedding_scale(self, dtype: torch.dtype) -> float:
        return self.embedding_multiplier

    @property
    def logits_scale(self) -> float:
        return 1 / self.logits_scaling

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the factors."""
        return super().architecture() | self.resolved(*FACTORS)


class ScaledLayer(PreNormLayer):
    """A layer that multiplies the outputs of attention and feed-forward by residual_multiplier."""

    def __init__(self, config: GraniteConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config.norm, attention, mlp)
        self.scale = config.residual_multiplier

    def forward(
        self, x: Tensor, positions: Any, mask: Any = None, states: States | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask, states) * self.scale
        return x + self.mlp(self.mlp_norm(x)) * self.scale


GRANITE = Family(
    kind="granite",
    title="a Granite",
    architecture="GraniteForCausalLM",
    ours=GraniteConfig,
    fields={**fields(), **{name: ConfigKey(name, float, 1.0) for name in FACTORS}},
    tied=False,
    groups=(ROPE_GROUP,),
    only={**SILU, "mlp_bias": (False,)},
    rates=("attention_dropout",),
    needs=(Need("window_size", lambda config: not any(config.windows), "left out"),),
    names=NAMES,
)

FAMILY = ModelFamily(
    GraniteConfig,
    tiny={
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 40,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
    },
    hugging_face=(GRANITE,),
)
