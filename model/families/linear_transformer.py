"""The Linear Transformer (Katharopoulos et al. 2020): a GPT with linear attention, features elu + 1, no decay.

Sinusoidal positions (Vaswani et al. 2017, section 3.5) are added to the embeddings and set no maximum length.
"""

from dataclasses import dataclass

from model.config import Footprint
from model.parts.settings import LinearConfig
from model.traits import Traits
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class LinearTransformerConfig(LinearConfig):
    """A GPT with linear attention, features elu + 1."""

    model_type: str = "linear_transformer"

    title = "Linear Transformer"
    positions = "sinusoidal"
    footprint = Footprint(fused_residual=10.0, gated=False)
    traits = Traits(norm="layer", feed_forward="gelu")
    linears = ("wq", "wk", "wv", "wo", "up", "down")

    def check(self) -> None:
        """Check the width of the positions."""
        super().check()
        must = "it must be even: sinusoidal positions come in pairs"
        require(self, self.hidden_size % 2 == 0, "hidden_size", must)

    @property
    def ffn_size(self) -> int:
        """Width inside the feed-forward."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def state_elements(self) -> int:
        """Elements of the states and normalisers of all layers, per sequence."""
        return self.num_layers * self.num_attention_heads * self.head_dim * (self.head_dim + 1)
