"""Predict the gain of matmuls in 8 bits, which train/float8.py sets up with torchao.

The matmuls of the layers take less time. All else is as with bfloat16: the output layer, attention,
pointwise work, memory and communication.
"""

import re

from planner.cluster import Cluster, ClusterError
from planner.step_shape import Arrangement
from train.float8 import Float8Config

SPEEDUP = {"tensorwise": 1.59, "rowwise": 1.19}
"""Rate of a layer's compiled 8-bit matmuls relative to 16-bit ones, keyed by recipe.

The casts of the operands are part of their time. Fitted to the rows of
papers/tables/float8_runs.csv in the half "fitted", without those of context parallelism.
"""
PUBLISHED_ERRORS = {"tensorwise": 0.08}
"""Largest relative error of the predictions for published 8-bit runs that were not used for
fitting, without context parallelism, keyed by recipe (``python -m papers.records --table float8``).
All published runs of the recipe by row were used for fitting."""
CONTEXT_PARALLEL_ERRORS = {4: -0.335, 8: -0.379}
"""Relative errors of the predictions for torchtitan's 8-bit runs with context parallelism, keyed by
its size."""
OLDER_CARDS = {
    *("P100", "V100", "T4", "A2", "A10", "A10G", "A16", "A30", "A40", "A100", "A800"),
    *("A4000", "A5000", "A6000"),
}
"""Cards whose compute capability is below 8.9, as words of a cluster's name.

A cluster file does not state the capability: a card that its name does not tell, or that is missing
here, counts as one with 8-bit matmuls. A run on it is refused at its start (train/float8.py).
"""


def float8_recipe(float8: Float8Config, cluster: Cluster) -> str:
    """Return the recipe of a run's 8-bit matmuls; empty if it has none.

    Raises ClusterError if the cluster's cards have no 8-bit matmuls.
    """
    if float8.fp8_format is None:
        return ""
    if OLDER_CARDS & set(re.split(r"[^A-Z0-9]+", cluster.name.upper())):
        raise ClusterError(
            f"fp8_format is {float8.fp8_format}, but the cluster is {cluster.name}, whose cards "
            "have no 8-bit matmuls; leave out --fp8-format, or name another --cluster"
        )
    return float8.fp8_recipe


def float8_speedup(arrangement: Arrangement) -> float:
    """Return the rate of the layers' matmuls relative to 16-bit ones.

    It is 1 without --compile: torch then casts operator by operator, and no published run tells
    what remains of the gain.
    """
    if arrangement.float8_recipe and arrangement.compiled:
        return SPEEDUP[arrangement.float8_recipe]
    return 1.0


def published_error(recipe: str, context_parallel_size: int, compiled: bool) -> str:
    """Return a sentence on the error of predictions in 8 bits, as published runs tell it."""
    if not compiled:
        return "unknown: no published run in float8 is uncompiled"
    if context_parallel_size > 1:
        sizes = " and ".join(map(str, CONTEXT_PARALLEL_ERRORS))
        percents = " and ".join(f"{-error:.0%}" for error in CONTEXT_PARALLEL_ERRORS.values())
        return (
            "unknown: of torchtitan's runs in float8 with a context parallel size of "
            f"{sizes}, predictions are {percents} too low"
        )
    if recipe not in PUBLISHED_ERRORS:
        return f"unknown: all published runs in float8 with recipe {recipe} were used for fitting"
    return (
        f"at most {PUBLISHED_ERRORS[recipe]:.0%} on published runs in float8, without context "
        "parallelism, that were not used for fitting"
    )
