"""The optimizers by the name that --optimizer takes."""

from train.optimizers.adamw import Adam
from train.optimizers.base import OptimizerSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adam": Adam(),
}
