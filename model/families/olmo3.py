"""OLMo 3 (arXiv:2512.13961): norms after attention and feed-forward, joint norms of queries and keys, two ropes."""

from dataclasses import dataclass

from model.config import Footprint
from model.parts.settings import LocalRopeConfig, RopePositionsConfig
from model.traits import Traits


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(LocalRopeConfig, RopePositionsConfig):
    """An OLMo 3: norms after attention and feed-forward; layers with a window have rope of their own."""

    model_type: str = "olmo3"

    title = "OLMo 3"
    # Inputs of the norms of queries and keys too.
    footprint = Footprint(fused_residual=5.0, gated=True)
    traits = Traits(norms="post", qk_norm="joint")
    joint_qk_norm = True
