"""Run micro-batches through a model that one rank holds whole; schedule.py runs them through pipeline stages."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from parallel.data import Strategy, set_gradient_sync

MicroBatch = dict[str, Tensor]

LossSum = Callable[[nn.Module, MicroBatch], Tensor]
"""Map a micro-batch to hidden states or, in the last stage, to the sum of its losses.

After the first stage, the batch holds hidden states in place of that stage's input.
"""


class Runner:
    """Run a step's micro-batches through a model that one rank holds whole."""

    def __init__(self, parts: Sequence[nn.Module], loss_sum: LossSum, strategy: Strategy) -> None:
        self.parts, self.loss_sum, self.strategy = parts, loss_sum, strategy

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by name, without tied copies that another rank of pp counts."""
        return {name: parameter for part in self.parts for name, parameter in part.named_parameters()}

    def forward_backward(self, batches: Sequence[MicroBatch], valid: int) -> Tensor:
        """Accumulate the gradients of the summed losses divided by ``valid``; return this rank's share of that loss.

        The share is float64: summing micro-batches and ranks adds no rounding to that of each loss.
        """
        (model,), losses = self.parts, []
        for index, batch in enumerate(batches):
            set_gradient_sync(model, index == len(batches) - 1, self.strategy)
            loss = self.loss_sum(model, batch) / valid
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).double().sum()

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Return this rank's share of the sum of losses, in float64."""
        (model,) = self.parts
        return torch.stack([self.loss_sum(model, batch) for batch in batches]).double().sum()
