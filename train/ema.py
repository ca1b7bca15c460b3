"""Exponential moving averages (EMA) of the weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.data import reshard, to_local
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Exponential moving average (EMA) of the weights over the iterations."""

    ema_decay: float | None = None
    """Share of the average that each iteration keeps, such as 0.9999; validation and samples use
    the averaged weights. 0 or none disables averaging."""

    def __post_init__(self) -> None:
        decay = self.ema_decay
        fix = "it must be 0 or more and below 1, such as 0.9999"
        require(self, decay is None or 0 <= decay < 1, "ema_decay", fix)


class Ema:
    """Averages of this rank's shards of the weights, in float32.

    Every rank averages its own shards, so that an update needs no communication. If several of
    this rank's parts have a parameter of the same name (tied embeddings), they share one average.
    """

    def __init__(self, decay: float, parts: Sequence[nn.Module]) -> None:
        """Start from the weights of ``parts``, this rank's initialised parts of the model."""
        self.decay = decay
        self._parts = parts
        self._copies: dict[str, list[nn.Parameter]] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                self._copies.setdefault(name, []).append(parameter)
        self.weights: dict[str, Tensor] = {}
        """The averages, keyed by parameter name and sharded like the weights."""
        for name, copies in self._copies.items():
            self.weights[name] = copies[0].detach().clone()

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the averages to the current weights."""
        for name, copies in self._copies.items():
            to_local(self.weights[name]).copy_(to_local(copies[0]))

    @torch.no_grad()
    def update(self) -> None:
        """Move each average towards its weight, by ``1 - decay`` of the difference."""
        weights = [to_local(copies[0]) for copies in self._copies.values()]
        averages = [to_local(average) for average in self.weights.values()]
        torch._foreach_lerp_(averages, weights, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as weights inside the block; after it the exact weights are back."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for part in self._parts:
            reshard(part)  # weights left gathered by a forward pass would not see the swap
        for name, copies in self._copies.items():
            average = to_local(self.weights[name])
            weight = to_local(copies[0]).clone()
            for parameter in copies:
                to_local(parameter).copy_(average)
            average.copy_(weight)
