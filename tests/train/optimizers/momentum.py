"""An optimizer with one state and no setting of its own, beside those of the tree."""

from dataclasses import dataclass

import torch

from train.optimizers.base import OptimizerSpec, OwnSettings

NAME = "momentum"


@dataclass(frozen=True, kw_only=True)
class NoSettings(OwnSettings):
    """None beside those that all optimizers share."""


class Momentum(OptimizerSpec):
    """Stochastic gradient descent with momentum; its vectors learn at half of the rate."""

    settings = NoSettings
    states = ("momentum_buffer",)

    def groups(self, config, weights):
        matrices, vectors = super().groups(config, weights)
        return [matrices, vectors | {"lr_factor": 0.5}]

    def build(self, config, groups, *, portable, ranks=None):
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)
