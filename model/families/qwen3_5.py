"""Qwen3.5: a LLaMA with a gate of attention's output, in which three layers of four have a gated delta rule."""

from dataclasses import dataclass

from model.config import Architecture, Footprint
from model.parts.settings import DeltaConfig, RopePositionsConfig, WindowedConfig
from model.traits import Traits
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(WindowedConfig, RopePositionsConfig, DeltaConfig):
    """A Qwen3.5: three layers of four have a gated delta rule."""

    model_type: str = "qwen3_5"
    rotary_percent: float = 1.0
    """Share of a head's channels that rope turns, the first ones, in a qwen3_5, whose released models have 0.25."""

    title = "Qwen3.5"
    # Inputs of two norms, in float32.
    footprint = Footprint(fused_residual=6.0, gated=True)
    traits = Traits(norm="zero_centred", qk_norm="head", output_gate=True, dt_ones=True)

    def check_turned(self) -> None:
        """Check the channels that turn."""
        require(self, 0 < self.rotary_percent <= 1, "rotary_percent", "it must be above 0, and 1 (all) at most")
        width = self.rotary_dim
        must = f"{width} of {self.head_dim} channels would turn, which must be an even number above 0"
        even = width % 2 == 0 or self.rotary_percent == 1
        require(self, width > 0 and even, "rotary_percent", must)
        if self.rotary_percent == 1:
            super().check_turned()

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rope turns."""
        return int(self.head_dim * self.rotary_percent)

    def architecture(self) -> Architecture:
        """Return that of ``DecoderConfig``, with the share that turns."""
        return super().architecture() | {"rotary_percent": self.rotary_percent}
