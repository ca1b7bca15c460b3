"""OLMo Hybrid: an OLMo without rope, in which three layers of four have a gated delta rule."""

from dataclasses import dataclass

from model.config import Footprint
from model.parts.settings import DeltaConfig, LengthConfig, WindowedConfig
from model.traits import Traits


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(WindowedConfig, LengthConfig, DeltaConfig):
    """An OLMo Hybrid: three layers of four have a gated delta rule, and none has rope."""

    model_type: str = "olmo_hybrid"

    title = "OLMo Hybrid"
    positions = "none"
    footprint = Footprint(fused_residual=4.0, gated=True)
    traits = Traits(norms="post", qk_norm="joint", most_beta=2.0, out_epsilon=1e-5)
    joint_qk_norm = True
