"""Shared layers: RMSNorm, LayerNorm, rotary positions, SwiGLU, SGLU, GELU feed-forward.

Shapes: B sequences, T tokens, H heads, D width of a head, C width of the residual stream.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from kernels.operators import Activation, gated, linear, rotate
from model.rope import RopeConfig, frequencies
from model.windows import Window
from runtime.tensors import accum_dtype

# Normalises 16-bit inputs in float32 and rounds once, at the end (Zhang & Sennrich 2019, eq. 4); the fused kernel saves
# x and one number per token. Hugging Face also rounds before the weight, which changes a quarter of bf16 outputs.
RMSNorm = nn.RMSNorm


class ZeroCentredRMSNorm(nn.RMSNorm):
    """RMS norm times 1 + weight, all in float32, since 1 + weight in bfloat16 has few of the weight's digits."""

    scale: float = 1.0
    """A factor of the result, before it is rounded."""

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Normalise x; by another ``weight`` under tensor parallelism, where the module's own is a DTensor."""
        wide = accum_dtype(x.dtype)
        weight = self.scale * (1 + (self.weight if weight is None else weight).to(wide))
        return F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps).to(x.dtype)


class JointRMSNorm(nn.RMSNorm):
    """RMS norm over the channels of all heads at once: [B, T, H, D] -> [B, T, H, D]."""

    joint = True
    """Read by parallel/tensor/split.py."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


# With weight and bias; also computes in float32 and rounds once.
LayerNorm = nn.LayerNorm
NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": RMSNorm,
    "zero_centred": ZeroCentredRMSNorm,
    "weightless": partial(RMSNorm, elementwise_affine=False),
    "layer": LayerNorm,
}
"""By ``model.traits.Traits.norm``: a width, ``eps`` -> the module."""


class Linear(nn.Linear):
    """``nn.Linear`` whose float32 products take the CPU's faster library: [..., I] -> [..., O]."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Rotary:
    """Rotary position embedding (Su et al. 2021) for explicit global positions, in Hugging Face's half-split layout.

    Of the first R channels of a head, i and i + R/2 rotate by position * base^(-2i/R) rad, or as its scaling says
    (``model.rope``); the others stay. Angles are
    computed in float64: float32 is off by up to 0.03 rad at position 512K. Created once per forward, for every
    layer. Deliberately not a tensor, tuple or dataclass: FSDP's mixed precision casts the tensors that it finds in what
    a layer takes to bf16.
    """

    def __init__(self, positions: Tensor, channels: int, rope: RopeConfig, dtype: torch.dtype) -> None:
        """Compute cos and sin of R ``channels``, float32 or wider, for integer positions [T] or [B, T].

        dtype is the activations'.
        """
        self.positions = positions
        turns, scale = frequencies(rope, channels, positions)  # [R/2]
        angles = positions.to(torch.float64)[..., None, None] * turns  # [T, 1, R/2] or [B, T, 1, R/2]
        dtype = accum_dtype(dtype)
        self.cos, self.sin = ((scale * part).to(dtype) for part in (angles.cos(), angles.sin()))
        self.local: Rotary | None = None
        """The rotation of layers with a window, where it is another."""

    def under(self, window: Window | None) -> "Rotary":
        """Return the rotation of a layer with this window."""
        return self if window is None or self.local is None else self.local

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [B, T, H, D] by its tokens' angles; computed in float32 or wider, returned in x's dtype."""
        turned = 2 * self.cos.shape[-1]
        if turned == x.shape[-1]:
            return rotate(x, self.cos, self.sin)
        return torch.cat((rotate(x[..., :turned], self.cos, self.sin), x[..., turned:]), -1)


class SwiGLU(nn.Module):
    """Gated feed-forward, down(silu(gate(x)) * up(x)) (Shazeer 2020, eq. 6): [B, T, C] -> [B, T, C].

    With another activation it is a GeGLU.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: Activation = "silu") -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate = Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up = Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down = Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate(x), self.up(x), self.activation))


class SGLU(SwiGLU):
    """Gated feed-forward without an activation, down(gate(x) * up(x)) (Qin et al. 2023): [B, T, C] -> [B, T, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class MLP(nn.Module):
    """Feed-forward with biases, down(gelu(up(x))), with GPT-2's tanh form of GELU (Hendrycks & Gimpel 2016)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.up = Linear(hidden_size, ffn_hidden_size)
        self.down = Linear(ffn_hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


FEED_FORWARDS: dict[str, Callable[[int, int], nn.Module]] = {
    "swiglu": SwiGLU,
    "geglu": partial(SwiGLU, activation="gelu"),
    "sglu": SGLU,
    "gelu": MLP,
}
"""By ``model.traits.Traits.feed_forward``: widths outside and inside -> the module."""


class PreNormLayer(nn.Module):
    """A layer [B, T, C] -> [B, T, C] of the modules attention_norm, attention, mlp_norm and mlp.

    ``places`` are what its attention is told of the tokens' positions.
    """

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.mlp_norm, self.mlp = norm(), mlp

    def forward(self, x: Tensor, places: Any, mask: Any = None, states: States | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), places, mask, states)
        return x + self.mlp(self.mlp_norm(x))


class PostNormLayer(PreNormLayer):
    """A layer that normalises what it adds to the residual stream, as OLMo 2 and 3 do (arXiv:2501.00656)."""

    def forward(self, x: Tensor, places: Any, mask: Any = None, states: States | None = None) -> Tensor:
        x = x + self.attention_norm(self.attention(x, places, mask, states))
        return x + self.mlp_norm(self.mlp(x))


class BothNormsLayer(PreNormLayer):
    """A layer that normalises what it reads of the residual stream and what it adds to it, as Gemma 2 and 3 do."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(norm, attention, mlp)
        self.attention_post_norm, self.mlp_post_norm = norm(), norm()

    def forward(self, x: Tensor, places: Any, mask: Any = None, states: States | None = None) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), places, mask, states))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


LAYERS = {"pre": PreNormLayer, "post": PostNormLayer, "both": BothNormsLayer}
"""By ``model.traits.Traits.norms``."""


def drop_layers(layers: nn.ModuleList, kept: range) -> None:
    """Drop all layers but ``kept``, which keep their numbers."""
    for number in set(range(len(layers))) - set(kept):
        delattr(layers, str(number))  # `del` would renumber the rest
