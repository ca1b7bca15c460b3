"""Optimizers by the name that --optimizer takes, each with what the rest must know of it."""

from train.optimizers.adamw import AdamW
from train.optimizers.base import OptimizerSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adam": AdamW(),
}
