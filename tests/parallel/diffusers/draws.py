"""Random inputs of tiny diffusion transformers: some 45 image tokens, padded text, a batch of 2."""

import torch
from torch import Tensor

HEADS = 12
"""Divided by 2, 3 and 4 ranks."""
WIDTH = 8
TEXT = 7
FRAMES, HEIGHT, WIDTH_OF_GRID = 3, 3, 5
"""Image tokens: 45, which no number of ranks here divides."""


def clip(channels: int = 4, patch: int = 2) -> Tensor:
    return torch.randn(2, channels, FRAMES, patch * HEIGHT, patch * WIDTH_OF_GRID)


def picture(height: int, width: int, channels: int = 4) -> Tensor:
    return torch.randn(2, channels, height, width)


def text(width: int = 16, length: int = TEXT) -> Tensor:
    return torch.randn(2, length, width)


def mask(first: int = 5, second: int = TEXT) -> Tensor:
    """The first sample has 5 text tokens of 7."""
    return (torch.arange(TEXT) < torch.tensor([[first], [second]])).long()


def positions(length: int, axes: int) -> Tensor:
    """Ids of the axes for a grid of 5 columns, float ``[length, axes]``."""
    index = torch.arange(length)
    ids = torch.zeros(length, axes)
    ids[:, 1] = index // 5
    ids[:, 2] = index % 5
    return ids


def times() -> Tensor:
    return torch.tensor([3.0, 500.0])
