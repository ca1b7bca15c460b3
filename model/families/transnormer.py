"""TransNormerLLM (Qin et al. 2023, arXiv:2307.14995), with linear attention with decay.

The output of attention is normalised and gated, and the feed-forward gated without an activation, as its released
models compute; the norms have no weights. With softmax_every the model is a hybrid: every so many-th layer has softmax
attention with rope, as every eighth in MiniMax-01 (2025, arXiv:2501.08313).
"""

from dataclasses import dataclass
from typing import Literal

from model.config import Architecture, Footprint
from model.parts.settings import LinearConfig, PeriodicConfig, RotaryConfig, WindowedConfig
from model.traits import Traits
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class TransnormerConfig(WindowedConfig, RotaryConfig, PeriodicConfig, LinearConfig):
    """A TransNormerLLM: linear attention with decay."""

    model_type: str = "transnormer"
    linear_decay: Literal["released", "paper"] | None = None
    """Decay of a transnormer's heads: as its released models do, the default, or as its paper writes."""

    title = "TransNormer"
    positions = "lrpe"
    # LRPE doubles the width of the first layer's queries and keys.
    footprint = Footprint(fused_residual=9.0, gated=True, first_layer=10.0)
    traits = Traits(norm="weightless", feed_forward="sglu")
    linears = ("wq", "wk", "wv", "wu", "wo", "gate", "up", "down")

    def check(self) -> None:
        """Check that rope has layers of softmax attention."""
        super().check()
        must = f"model_type {self.model_type} has LRPE positions, which take no settings; leave it out"
        require(self, self.some_softmax or self.is_default("rotary_base"), "rotary_base", must)

    @property
    def state_elements(self) -> int:
        """Elements of the states of all layers, per sequence; LRPE doubles the first layer's keys."""
        state = self.num_attention_heads * self.head_dim**2
        return state * (self.recurrent_layers + (not self.has_softmax(0)))

    def architecture(self) -> Architecture:
        """Return that of ``DecoderConfig``, with the decay."""
        return super().architecture() | {"linear_decay": self.linear_decay or "released"}
