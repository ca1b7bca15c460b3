"""Rotary position embedding, made once per forward for every layer.

Shapes: B sequences, T tokens, H heads, D width of a head, R channels that turn.
"""

import torch
from torch import Tensor

from kernels.operators import rotate
from model.parts.rope import RopeConfig, frequencies
from model.parts.windows import Window
from runtime.tensors import accum_dtype


class Rotary:
    """Rotary position embedding (Su et al. 2021) for explicit global positions, in Hugging Face's
    half-split layout.

    Of the first R channels of a head, i and i + R/2 rotate by position * base^(-2i/R) rad, or as
    its scaling says (``model.parts.rope``); the others stay. Angles are computed in float64:
    float32 is off by up to 0.03 rad at position 512K. Created once per forward, for every layer.
    Deliberately not a tensor, tuple or dataclass: FSDP's mixed precision casts the tensors that it
    finds in what a layer takes to bf16.
    """

    def __init__(
        self, positions: Tensor, channels: int, rope: RopeConfig, dtype: torch.dtype
    ) -> None:
        """Compute cos and sin of R ``channels``, float32 or wider, for integer positions [T] or [B,
        T].

        dtype is the activations'.
        """
        self.positions = positions
        turns, scale = frequencies(rope, channels, positions)  # [R/2]
        angles = (
            positions.to(torch.float64)[..., None, None] * turns
        )  # [T, 1, R/2] or [B, T, 1, R/2]
        dtype = accum_dtype(dtype)
        self.cos, self.sin = ((scale * part).to(dtype) for part in (angles.cos(), angles.sin()))
        self.local: Rotary | None = None
        """The rotation of layers with a window, where it is another."""

    def under(self, window: Window | None) -> "Rotary":
        """Return the rotation of a layer with this window."""
        return self if window is None or self.local is None else self.local

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [B, T, H, D] by its tokens' angles; computed in float32 or wider, returned in
        x's dtype.
        """
        turned = 2 * self.cos.shape[-1]
        if turned == x.shape[-1]:
            return rotate(x, self.cos, self.sin)
        return torch.cat((rotate(x[..., :turned], self.cos, self.sin), x[..., turned:]), -1)
