"""Registry of the optimizers, keyed by the value of --optimizer."""

from train.optimizers.adamw import Adam
from train.optimizers.base import OptimizerSpec
from train.optimizers.muon import MuonSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adam": Adam(),
    "muon": MuonSpec(),
}
