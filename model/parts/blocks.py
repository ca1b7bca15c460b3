"""Transformer layers that normalise before attention and feed-forward, after them, or both."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from kernels.cache import States
from model.parts.weights import Inits, Splits


class PreNormLayer(nn.Module):
    """A layer that normalises the input of attention and feed-forward: [B, T, C] -> [B, T, C].

    ``positions`` are a Rotary, integer positions or None, whichever the attention takes.
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
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp

    def forward(
        self, x: Tensor, positions: Any, mask: Any = None, states: States | None = None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions, mask, states)
        return x + self.mlp(self.mlp_norm(x))


class PostNormLayer(PreNormLayer):
    """A layer that normalises the output of each branch, as in OLMo 2 and 3 (arXiv:2501.00656)."""

    def forward(
        self, x: Tensor, positions: Any, mask: Any = None, states: States | None = None
    ) -> Tensor:
        x = x + self.attention_norm(self.attention(x, positions, mask, states))
        return x + self.mlp_norm(self.mlp(x))


class BothNormsLayer(PreNormLayer):
    """A layer that normalises the input and the output of each branch, as in Gemma 2 and 3."""

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
        self.attention_post_norm = norm()
        self.mlp_post_norm = norm()

    def forward(
        self, x: Tensor, positions: Any, mask: Any = None, states: States | None = None
    ) -> Tensor:
        x = x + self.attention_post_norm(
            self.attention(self.attention_norm(x), positions, mask, states)
        )
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


def drop_layers(layers: nn.ModuleList, retained: range) -> None:
    """Drop all layers except the retained ones, which keep their numbers and so their names."""
    for number in set(range(len(layers))) - set(retained):
        delattr(layers, str(number))  # `del` would renumber the other layers
