"""The Linear Transformer (Katharopoulos et al. 2020): a GPT with linear attention.

Queries and keys become features elu(x) + 1, and the state does not decay. Sinusoidal positions
(Vaswani et al. 2017, section 3.5) are added to the embeddings and do not limit the length.
"""

from dataclasses import dataclass

from torch import nn

from model.config import Footprint
from model.families.family import ModelFamily
from model.parts.attention import HybridAttention
from model.parts.blocks import PreNormLayer
from model.parts.feed_forward import MLP
from model.parts.linear_attention import LinearAttention, LinearConfig, Sinusoids
from model.parts.norms import LayerNorm
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class LinearTransformerConfig(LinearConfig):
    """A Linear Transformer: a GPT with linear attention over features elu(x) + 1."""

    model_type: str = "linear_transformer"

    title = "Linear Transformer"
    positions = "sinusoidal"
    footprint = Footprint(fused_residual=10.0, gated=False)
    linears = ("wq", "wk", "wv", "wo", "up", "down")

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        attention = LinearAttention(self, layer, cores.linear)
        return PreNormLayer(self.norm, attention, MLP(self.hidden_size, self.ffn_size))

    def norm(self, width: int | None = None) -> nn.Module:
        return LayerNorm(width or self.hidden_size, eps=self.norm_epsilon)

    def added_positions(self) -> nn.Module:
        """Build the sinusoidal positions, which are added to embeddings."""
        return Sinusoids(self.hidden_size)

    def check(self) -> None:
        """Check that hidden_size is even, as the positions need."""
        super().check()
        must = "it must be even, since sinusoidal positions are pairs of a sine and a cosine"
        require(self, self.hidden_size % 2 == 0, "hidden_size", must)

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def state_elements(self) -> int:
        """Number of elements in the states and normalisers of all layers, per sequence."""
        return self.num_layers * self.num_attention_heads * self.head_dim * (self.head_dim + 1)


FAMILY = ModelFamily(
    LinearTransformerConfig,
    tiny={"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40},
    hugging_face=(),
)
