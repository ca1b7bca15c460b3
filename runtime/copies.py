"""Copies of what the host worked out to the device, for which the host does not wait, and which are kept."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
FORGET: list[Callable[[], None]] = []
"""Let go of what each function keeps: the next call copies, as it would for another micro-batch."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host; on a GPU in order with the current stream alone."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def cached_on_device(maxsize: int) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Keep what a function of hashable arguments returns, the device last: for each stream apart, as another one would
    not wait for the copy."""

    def decorate(make: Callable[..., R]) -> Callable[..., R]:
        cached = lru_cache(maxsize)(lambda stream, *arguments: make(*arguments))

        @wraps(make)
        def found(*arguments: Any) -> R:
            device = arguments[-1]
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            return cached(stream, *arguments)

        found.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        FORGET.append(cached.cache_clear)
        return found

    return decorate
