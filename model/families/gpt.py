"""GPT (Radford et al. 2019): LayerNorm, GELU, biases, and learned positions or rope."""

from dataclasses import dataclass
from typing import Literal

from model.config import Footprint
from model.parts.rope import RopeConfig
from model.parts.settings import LengthConfig, RotaryConfig, WindowedConfig
from model.traits import Traits
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class GPTConfig(WindowedConfig, RotaryConfig, LengthConfig):
    """A GPT: LayerNorm, GELU, biases."""

    model_type: str = "gpt"
    position_embedding_type: Literal["rope", "learned_absolute"] | None = None
    """Source of tokens' positions; by default rope, and learned_absolute in a model with a table of them."""

    title = "GPT"
    footprint = Footprint(fused_residual=4.0, gated=False)
    traits = Traits(norm="layer", biases=True, feed_forward="gelu")
    linears = ("wq", "wk", "wv", "wo", "up", "down")

    def check(self) -> None:
        """Check that learned positions have a table, and no rope."""
        super().check()
        if not self.learned_positions:
            return
        must = (
            "learned_absolute positions need the length of their table; set it to the longest sequence, or "
            "position_embedding_type to rope"
        )
        require(self, self.max_position_embeddings is not None, "max_position_embeddings", must)
        must = "learned_absolute positions turn nothing; leave it out, or set position_embedding_type to rope"
        require(self, self.is_default("rotary_base"), "rotary_base", must)

    @property
    def positions(self) -> str:
        """Where tokens' positions come from."""
        return self.position_embedding_type or "learned_absolute"

    @property
    def learned_positions(self) -> bool:
        """Return whether positions are learned embeddings."""
        return self.positions == "learned_absolute"

    @property
    def rope(self) -> RopeConfig | None:
        """Rope of attention; None if nothing turns."""
        return None if self.learned_positions else self

    @property
    def ffn_size(self) -> int:
        """Width inside the feed-forward."""
        return self.ffn_hidden_size or 4 * self.hidden_size
