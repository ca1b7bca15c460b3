"""Micro-batches through a model that one rank holds whole; schedule.py has them pass through stages of it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel.data import Strategy, reduce_gradients

Batch = dict[str, Tensor]


class LossSum(Protocol):
    """What a stage makes of a micro-batch: hidden states, or in the last stage the sum of losses."""

    def __call__(self, model: nn.Module, local: Batch) -> Tensor:
        """In all but the first stage ``local`` holds hidden states in the place of the first stage's input."""


class Runner:
    """Takes the micro-batches of a step through a model that one rank holds whole."""

    def __init__(self, parts: Sequence[nn.Module], loss_sum: LossSum, strategy: Strategy) -> None:
        self.parts, self.loss_sum, self.strategy = parts, loss_sum, strategy

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by name; those of which another rank of pp counts the same copy are left out."""
        return {name: parameter for part in self.parts for name, parameter in part.named_parameters()}

    def forward_backward(self, batches: Sequence[Batch], valid: int) -> Tensor:
        """Accumulate the gradients of the sum of losses over ``valid``; returns this rank's share of that loss.

        That is float64, so that adding up micro-batches and ranks rounds nothing more than each one's loss was.
        """
        (model,), losses = self.parts, []
        for index, batch in enumerate(batches):
            reduce_gradients(model, index == len(batches) - 1, self.strategy)
            loss = self.loss_sum(model, batch) / valid
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).double().sum()

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """This rank's share of the sum of losses, float64."""
        (model,) = self.parts
        return torch.stack([self.loss_sum(model, batch) for batch in batches]).double().sum()
