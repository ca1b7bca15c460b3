"""Rotary position embedding, computed once per forward pass and shared by all layers.

Shapes: B sequences, T tokens, H heads, D width of a head, R channels of a head that rotate.
"""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from kernels.operators import rotate
from model.parts.rope import RopeConfig, frequencies
from model.parts.windows import Window
from runtime.tensors import accum_dtype


class Rotary:
    """Cosines and sines of rotary positions (Su et al. 2021), in Hugging Face's half-split layout.

    Channels i and i + R/2 of a head rotate together by position * base^(-2i/R) rad, or by the
    frequencies of a scaling (``model.parts.rope``); channels from R on do not rotate. Positions are
    global and explicit, so a rank that holds every eighth chunk of a sequence rotates correctly.

    Angles are computed in float64: float32 is off by up to 0.03 rad at position 512K.

    Deliberately not a tensor, tuple or dataclass: FSDP's mixed precision looks inside those for
    tensors among a layer's arguments, and would cast cosines and sines to bfloat16.
    """

    def __init__(
        self, positions: Tensor, channels: int, rope: RopeConfig, dtype: torch.dtype
    ) -> None:
        """Compute cosines and sines [T, 1, R/2] or [B, T, 1, R/2], float32 or wider.

        Args:
            positions: integers [T] or [B, T].
            channels: number R of channels that rotate.
            dtype: dtype of the activations.
        """
        self.positions = positions
        radians, scale = frequencies(rope, channels, positions)  # [R/2] per position
        angles = positions.to(torch.float64)[..., None, None] * radians  # [T or B, T, 1, R/2]
        dtype = accum_dtype(dtype)
        self.cos = (scale * angles.cos()).to(dtype)
        self.sin = (scale * angles.sin()).to(dtype)
        self.local: Rotary | None = None
        """The rotation in layers with a window, if it differs from that in other layers."""

    def under(self, window: Window | None) -> "Rotary":
        """Return the rotation of a layer with this window."""
        if window is None or self.local is None:
            return self
        return self.local

    def of(self, take: Callable[[Tensor, int], Tensor]) -> "Rotary":
        """Return the rotation of some of the tokens.

        Args:
            take: function (x, dim) that takes these tokens from x along ``dim``.
        """
        part = copy(self)
        part.positions = take(self.positions, -1)
        part.cos = take(self.cos, -3)
        part.sin = take(self.sin, -3)
        if self.local is not None:
            part.local = self.local.of(take)
        return part

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [B, T, H, D] by its tokens' angles, in float32 or wider; keep x's dtype."""
        rotated = 2 * self.cos.shape[-1]  # R
        if rotated == x.shape[-1]:
            return rotate(x, self.cos, self.sin)
        return torch.cat((rotate(x[..., :rotated], self.cos, self.sin), x[..., rotated:]), -1)
