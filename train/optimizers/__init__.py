"""Registry of the optimizers, keyed by the value of --optimizer."""

from train.optimizers.adamw import Adam
from train.optimizers.base import OptimizerSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adam": Adam(),
}
