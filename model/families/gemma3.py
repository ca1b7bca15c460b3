"""Gemma 3 (arXiv:2503.19786): norms on both sides of attention and feed-forward, GeGLU, two ropes."""

from dataclasses import dataclass

from model.config import Architecture, Footprint
from model.parts.settings import LocalRopeConfig, RopePositionsConfig
from model.traits import Traits


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(LocalRopeConfig, RopePositionsConfig):
    """A Gemma 3: norms on both sides, GeGLU; layers with a window have rope of their own."""

    model_type: str = "gemma3"
    query_pre_attn_scalar: int | None = None
    """Number by whose root the scores of a gemma3's attention are divided; by default the width of a head."""

    title = "Gemma 3"
    # Inputs of four norms, in float32.
    footprint = Footprint(fused_residual=13.0, gated=True)
    traits = Traits(norm="zero_centred", norms="both", qk_norm="head", feed_forward="geglu", rounds_scale=True)

    def check(self) -> None:
        """Check the scale of scores."""
        super().check()
        self.check_counts("query_pre_attn_scalar")

    @property
    def query_scalar(self) -> int:
        """Number by whose root attention's scores are divided."""
        return self.query_pre_attn_scalar or self.head_dim

    def architecture(self) -> Architecture:
        """Return that of ``DecoderConfig``, with the scale of scores."""
        return super().architecture() | self.resolved("query_pre_attn_scalar")
