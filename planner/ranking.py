"""Results of a search: configurations with their predictions, in a few words, and why the others were discarded."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Any

from parallel.mesh import SIZES
from planner.cluster import Cluster
from planner.step_cost import Prediction

PREDICTED, PROFILED = 0.10, 0.036
"""Errors of predicted seconds and of those of a few profiled iterations: standard deviations of their logarithms within
a setting of ``bench.link.choices``, on 2026-11-23."""


@dataclass(frozen=True)
class Candidate:
    """A configuration and its prediction."""

    config: Any
    prediction: Prediction


@dataclass(frozen=True)
class Ranking:
    """Configurations that fit, fastest first; refusals by reason; what does not fit in memory."""

    candidates: list[Candidate]
    refused: Counter[str]
    over_memory: list[float]
    """Bytes that each of the others needs, in the settings that need least."""
    over_host_memory: list[float]
    """Bytes that each of those that would fit moves to host memory, which has less."""
    saving: tuple[str, ...] = ()
    """Fields by which a configuration takes less memory, and which were not tried."""
    moving: tuple[str, ...] = ()
    """Fields by which all that was tried moves something to host memory."""


def nothing_left(found: Ranking, cluster: Cluster) -> str:
    """Say why there is no candidate, and what to do."""
    if found.over_memory:
        least = min(found.over_memory)
        more = "".join(f", {name}" for name in found.saving)
        asked = " (python -m tools.plan --fits says what brings most)" if found.saving else ""
        return (
            f"memory_gb of {cluster.name} is {cluster.memory_gb:g} and the smallest of "
            f"{len(found.over_memory)} tried takes {least / 1e9:.1f}; use more processes{more} or a lower seq_length"
            f"{asked}"
        )
    if found.over_host_memory:
        without = f", or leave {' or '.join(found.moving)} out" if found.moving else ""
        return (
            f"host_memory_gb of {cluster.name} is {cluster.host_memory_gb:g} and the least of "
            f"{len(found.over_host_memory)} tried moves there {min(found.over_host_memory) / 1e9:.1f}; "
            f"use more processes or a lower seq_length{without}"
        )
    reason = next(iter(found.refused), "there is no arrangement of these processes")
    return f"context_parallel_method is auto, and no method suits: {reason}"


def combine_prediction_and_profile(predicted: Sequence[float], profiled: Sequence[float]) -> list[float]:
    """Return candidates' seconds by prediction and profile together, weighed by the inverse squares of their errors.

    Of predictions the ratios count: by how much all are off is found from the profiles.
    """
    share = PROFILED**-2 / (PROFILED**-2 + PREDICTED**-2)
    pairs = [(log(said), log(real)) for said, real in zip(predicted, profiled, strict=True)]
    off = fmean(real - said for said, real in pairs)
    return [exp(share * real + (1 - share) * (said + off)) for said, real in pairs]


def method_of(config: Any) -> str:
    """Describe the method in a few words."""
    context = config.context
    return context.title + (f", {context.context_parallel_placement}" if context.context_parallel_team_size > 1 else "")


def mesh_of(config: Any) -> str:
    """Describe the mesh in a few words."""
    named = ((name.split("_")[0], getattr(config.mesh, name)) for name in SIZES)
    return ", ".join(f"{name} {size}" for name, size in named if size > 1) or "data"


def memory_of(config: Any) -> str:
    """Describe the sharding and what is computed again, in chunks or moved, in a few words."""
    again = config.recompute
    chunks = [name for name, size in (("loss", again.loss_chunk_size), ("FFN", again.ffn_chunk_size)) if size]
    words = [config.data_parallel.strategy, again.recompute_granularity]
    words += [f"{' and '.join(chunks)} in chunks"] * bool(chunks) + ["offload"] * again.recompute_offload
    words += ["moments on the host"] * config.optimizer.optimizer_cpu_offload
    return ", ".join(word for word in words if word != "none")


def described(config: Any) -> str:
    """Describe the method, the mesh and the memory, as far as there is something to say."""
    return ", ".join(filter(None, (method_of(config), mesh_of(config), memory_of(config))))
