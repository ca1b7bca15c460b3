"""Layers of an attention, a feed-forward and norms before them, after them, or both."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from kernels.cache import States
from model.parts.weights import Inits, Splits


class PreNormLayer(nn.Module):
    """A layer [B, T, C] -> [B, T, C] of the modules attention_norm, attention, mlp_norm and mlp.

    ``places`` are what its attention is told of the tokens' positions.
    """

    INIT: ClassVar[Inits] = {"attention_norm": "ones", "mlp_norm": "ones"}
    SPLIT: ClassVar[Splits] = {
        "attention_norm": "tokens",
        "attention": "all_tokens",
        "mlp_norm": "tokens",
        "mlp": "all_tokens",
    }

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.mlp_norm, self.mlp = norm(), mlp

    def forward(
        self, x: Tensor, places: Any, mask: Any = None, states: States | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), places, mask, states)
        return x + self.mlp(self.mlp_norm(x))


class PostNormLayer(PreNormLayer):
    """A layer that normalises what it adds to the residual stream, as OLMo 2 and 3 do
    (arXiv:2501.00656).
    """

    def forward(
        self, x: Tensor, places: Any, mask: Any = None, states: States | None = None
    ) -> Tensor:
        x = x + self.attention_norm(self.attention(x, places, mask, states))
        return x + self.mlp_norm(self.mlp(x))


class BothNormsLayer(PreNormLayer):
    """A layer that normalises what it reads of the residual stream and what it adds to it, as Gemma
    2 and 3 do.
    """

    INIT: ClassVar[Inits] = {
        **PreNormLayer.INIT,
        "attention_post_norm": "ones",
        "mlp_post_norm": "ones",
    }
    SPLIT: ClassVar[Splits] = {
        **PreNormLayer.SPLIT,
        "attention_post_norm": "tokens",
        "mlp_post_norm": "tokens",
    }

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(norm, attention, mlp)
        self.attention_post_norm, self.mlp_post_norm = norm(), norm()

    def forward(
        self, x: Tensor, places: Any, mask: Any = None, states: States | None = None
    ) -> Tensor:
        x = x + self.attention_post_norm(
            self.attention(self.attention_norm(x), places, mask, states)
        )
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


def drop_layers(layers: nn.ModuleList, kept: range) -> None:
    """Drop all layers but ``kept``, which keep their numbers."""
    for number in set(range(len(layers))) - set(kept):
        delattr(layers, str(number))  # `del` would renumber the rest
