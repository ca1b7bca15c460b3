"""Choose what a run leaves to the planner: ``auto`` settings, and the mesh after a resize.

With ``--allow-resize`` a run that is started on another number of processes continues with the same
global batch and samples, on a mesh chosen here.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from parallel.context import ContextConfig
from planner.cluster import Cluster, ClusterError, default_cluster, endless, load_cluster
from planner.layers.delta_cost import fastest_schedule
from planner.levers import settings
from planner.limits import nothing_left
from planner.search import Candidate, arrangements, cost_inputs, rank, suits
from planner.step_cost import delta_cost
from planner.workload import known_documents, layout_seconds
from runtime.errors import divisors
from runtime.progress import counted, duration
from train.config.common import CommonConfig
from train.config.derive import with_vocabulary
from train.config.finalize import Planner
from train.config.flags import ConfigError

C = TypeVar("C", bound=CommonConfig)
PREDICTED_ERROR = 0.10
"""Standard deviation of the error of log(predicted seconds per iteration); the smaller it is, the
more predictions weigh against profiles.

Measured on 2026-11-23 over the candidates of each setting in
``bench/results/choices-amd-epyc-2-cores.md``.
"""
PROFILED_ERROR = 0.036
"""Standard deviation of the error of log(seconds per iteration) if a few iterations are profiled;
the smaller it is, the more profiles weigh against predictions."""


def fastest_method(
    config: CommonConfig, world_size: int, *, steps: bool = True
) -> tuple[ContextConfig, str]:
    """Choose the context-parallel method predicted to be fastest; return it and a line for the log.

    Every method and option that fits the mesh is predicted for a typical micro-batch. ``steps`` is
    False if no training steps follow; memory then counts as unlimited.

    Raises:
        ConfigError: no method fits the sizes or memory.
        ClusterError: the cluster file is invalid, or none matches this device.
    """
    cluster = cluster_of(config)
    if not steps:
        cluster = endless(cluster)
    ranking = rank([config], world_size, cluster)
    if not ranking.candidates:
        raise ConfigError(nothing_left(ranking, cluster))
    best = ranking.candidates[0]
    line = (
        f"context parallelism: {best.config.context.title}, "
        f"predicted to take {duration(best.prediction.time)} per iteration on {cluster.name}, "
        f"the fastest of {len(ranking.candidates)} that fit"
    )
    return with_schedule(best.config, cluster).context, line


def cluster_of(config: CommonConfig) -> Cluster:
    """Return the cluster that the run names, or else the cluster of this machine.

    For this machine, the number of processes per node is the number that the launcher started.

    Raises:
        ClusterError: the cluster file is invalid, or no file describes this device.
    """
    if config.context.cluster is not None:
        return load_cluster(config.context.cluster)
    cluster = default_cluster(config.mesh.device_type)
    ranks_per_node = config.mesh.context_ranks_per_node
    if ranks_per_node is None:
        return cluster
    tp = config.mesh.tensor_model_parallel_size
    return replace(cluster, gpus_per_node=ranks_per_node * tp)


def with_layout(config: C, cluster: Cluster | None = None) -> C:
    """Replace the layout ``auto`` of a hybrid's softmax layers by the one predicted to be faster.

    The prediction is for ``cluster``, by default this machine.

    Raises:
        ConfigError: two layouts are possible, but no cluster file describes this device.
    """
    hybrid: Any = getattr(config, "hybrid", None)
    if not config.hybrid_layouts or hybrid.hybrid_softmax_layout != "auto":
        return config
    mesh = config.mesh
    layouts = hybrid.layouts(config.context.context_parallel_layout)
    if mesh.context_parallel_size == 1 or len(layouts) == 1:
        return config.updated(hybrid_softmax_layout=layouts[0])
    try:
        cluster = cluster or default_cluster(mesh.device_type)
    except ClusterError as error:
        raise ConfigError(
            "hybrid_softmax_layout is auto, but the faster layout cannot be predicted "
            f"({error}); give --hybrid-softmax-layout zigzag or contiguous"
        ) from error
    costs = layout_seconds(config, cluster)
    return config.updated(hybrid_softmax_layout=min(costs, key=costs.__getitem__))


def with_schedule(config: C, cluster: Cluster | None = None) -> C:
    """Replace the schedule ``auto`` of a delta rule's states by the one predicted to be fastest.

    ``auto`` stays for layers in slices, which pass no states from rank to rank. The prediction is
    for ``cluster``, by default this machine. If no cluster file describes this device, ``auto``
    stays as well, and training then chooses by the longest document
    (parallel/context/linear/segments.py).
    """
    context = config.context
    pp, cp, tp = config.mesh.sizes
    is_chosen = context.delta_rule_schedule != "auto" or context.context_parallel_method == "none"
    if cp == 1 or not config.delta or is_chosen or config.recompute.layer_chunk_size:
        return config
    try:
        cluster = cluster or cluster_of(config)
    except ClusterError:
        return config
    work, plan, _ = cost_inputs(config, pp * cp * tp, cluster, known_documents(config))
    return config.updated(delta_rule_schedule=fastest_schedule(delta_cost(work, plan, cluster, tp)))


method_to_read = partial(fastest_method, steps=False)
"""Chooses the context-parallel method of a model that is only evaluated or generates text."""


def rearranged(config: C, processes: int, entries: int | None) -> tuple[C, str]:
    """Return the configuration with the mesh predicted to be fastest, and a line for the log.

    The mesh is for this number of ``processes``, and the micro-batch size changes with it. The
    method and its options stay if they suit the mesh; sharding and recomputation stay unless memory
    is short. ``entries`` is the vocabulary size of a language model's tokenizer, or None.

    Raises:
        ConfigError: no mesh keeps global_batch_size (the message lists the numbers of processes
            that allow one), or none fits in memory.
    """
    cluster = cluster_of(config)
    complete = config if entries is None else with_vocabulary(config, entries)

    # Settings that save memory are varied only if nothing fits as the run is configured.
    meshes = list(divided(complete, processes))
    ranking = rank(meshes, processes, cluster)
    if not ranking.candidates and (ranking.over_memory or ranking.over_host_memory):
        ranking = rank(meshes, processes, cluster, vary=settings)
        if not ranking.candidates:
            raise ConfigError(nothing_left(ranking, cluster))
    if not ranking.candidates:
        raise ConfigError(
            f"allow_resize is set, but no mesh of {counted(processes, 'process')} suits the model "
            f"and keeps the run's global_batch_size {config.train.global_batch_size} (set for "
            f"{config.mesh.full_world_size} processes); "
            f"start {_fitting(complete, processes)} processes"
        )

    # The run's own method and options stay if they suit the new mesh.
    candidates = _keeping_method(ranking.candidates, config.context.context_parallel_method)
    best = candidates[0].config
    context = config.context
    if not suits(replace(best, context=context), processes):
        context = best.context
    sections: Any = {
        name: getattr(best, name) for name in ("mesh", "train", "data_parallel", "recompute")
    }
    line = (
        f"predicted to take {duration(candidates[0].prediction.time)} per iteration "
        f"on {cluster.name}, the fastest of {len(candidates)} that fit"
    )
    return replace(config, context=context, **sections), line


def _keeping_method(candidates: list[Candidate], method: str) -> list[Candidate]:
    """Return the candidates with this method; all if it is ``auto`` or no candidate has it.

    A mesh without context parallelism suits every method.
    """
    if method == "auto":
        return candidates
    keeping = []
    for candidate in candidates:
        is_local = candidate.config.mesh.context_parallel_size == 1
        if is_local or candidate.config.context.context_parallel_method == method:
            keeping.append(candidate)
    return keeping or candidates


def divided(config: C, processes: int) -> Iterator[C]:
    """Yield every mesh that allows global_batch_size, with its largest possible micro-batch.

    The micro-batch size is at most the configured one. A pipeline may need more micro-batches, so
    for a mesh with a pipeline all smaller sizes that divide the largest follow.
    """
    global_batch = config.train.global_batch_size or 1
    for arrangement in arrangements(config, processes):
        dp = arrangement.mesh.data_parallel_size(processes)
        if global_batch % dp:
            continue
        largest = math.gcd(config.train.micro_batch_size, global_batch // dp)
        yield arrangement.updated(micro_batch_size=largest)
        if arrangement.mesh.pipeline_model_parallel_size > 1:
            for size in reversed(divisors(largest)[:-1]):
                yield arrangement.updated(micro_batch_size=size)


def _fitting(config: CommonConfig, processes: int) -> str:
    """List the numbers of processes, in full nodes, for which a valid mesh exists."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    step = per_node if processes % per_node == 0 else 1
    full_size = config.mesh.full_world_size or processes
    fitting = []
    for size in range(step, max(full_size, processes) + 1, step):
        if any(suits(mesh, size) for mesh in divided(config, size)):
            fitting.append(str(size))
    return ", ".join(fitting) or "more"


def combine_prediction_and_profile(
    predicted: Sequence[float], profiled: Sequence[float]
) -> list[float]:
    """Combine candidates' predicted and profiled seconds, weighted by their inverse variances.

    Only the ratios between predictions count; their common error is estimated from the profiles.
    """
    share = PROFILED_ERROR**-2 / (PROFILED_ERROR**-2 + PREDICTED_ERROR**-2)
    log_predicted = [math.log(seconds) for seconds in predicted]
    log_profiled = [math.log(seconds) for seconds in profiled]
    pairs = list(zip(log_predicted, log_profiled, strict=True))
    offset = fmean(real - estimate for estimate, real in pairs)
    return [math.exp(share * real + (1 - share) * (estimate + offset)) for estimate, real in pairs]


PLANNER = Planner(method=fastest_method, settings=(with_layout, with_schedule), mesh=rearranged)
"""Functions that choose a training run's ``auto`` settings, and its mesh after a resize."""
READER = PLANNER._replace(method=method_to_read)
"""The same functions for a model that is only evaluated or generates text."""
