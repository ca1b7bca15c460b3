"""Optimizers by the name that --optimizer takes, each with what the rest must know of it."""

from train.optimizers.adamw import Adam
from train.optimizers.base import OptimizerSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adam": Adam(),
}
