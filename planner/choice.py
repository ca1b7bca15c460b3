"""Settings that a run leaves to the planner: method and layout ``auto``, and the mesh under
``--allow-resize``.

A run on other processes than its mesh's sizes are for goes on with the same global batch and
samples.
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
from planner.delta_cost import fastest_schedule
from planner.levers import settings
from planner.search import Candidate, arrangements, cost_inputs, nothing_left, rank, suits
from planner.step_cost import delta_cost
from planner.workload import known_documents, layout_seconds
from runtime.progress import counted, duration
from train.config.common import CommonConfig
from train.config.derive import with_vocabulary
from train.config.finalize import Planner
from train.config.flags import ConfigError

C = TypeVar("C", bound=CommonConfig)
PREDICTED, PROFILED = 0.10, 0.036
"""Errors of predicted seconds and of those of a few profiled iterations: standard deviations of
their logarithms within a setting of ``bench/results/choices-amd-epyc-2-cores.md``, on
2026-11-23."""


def fastest_method(
    config: CommonConfig, world_size: int, *, steps: bool = True
) -> tuple[ContextConfig, str]:
    """Choose the method that is predicted fastest; return it with a line that says so.

    Without ``steps`` of training to come, memory is no condition.

    Raises:
        ConfigError: no method fits the sizes or memory.
        ClusterError: the cluster file is invalid, or none matches this device.
    """
    cluster = cluster_of(config) if steps else endless(cluster_of(config))
    found = rank([config], world_size, cluster)
    if not found.candidates:
        raise ConfigError(nothing_left(found, cluster))
    best, others = found.candidates[0], len(found.candidates) - 1
    return with_schedule(best.config, cluster).context, (
        f"context parallelism: {best.config.context.title}, predicted to take {duration(best.prediction.time)} per "
        f"iteration on {cluster.name}, the least of {others + 1}"
    )


def cluster_of(config: CommonConfig) -> Cluster:
    """Return the cluster that is named or, with as many processes per node as launched, the one at
    hand.

    Raises:
        ClusterError: its file is invalid, or none is about this device.
    """
    named, per_node = config.context.cluster, config.mesh.context_ranks_per_node
    cluster = default_cluster(config.mesh.device_type) if named is None else load_cluster(named)
    if named is None and per_node is not None:
        cluster = replace(cluster, gpus_per_node=per_node * config.mesh.tensor_model_parallel_size)
    return cluster


def with_layout(config: C, cluster: Cluster | None = None) -> C:
    """Replace the layout ``auto`` of a hybrid's softmax layers by the one predicted faster, here or
    on a cluster.

    Raises:
        ConfigError: there are two to choose from, and no cluster file matches this device.
    """
    hybrid: Any = getattr(config, "hybrid", None)
    if not config.hybrid_layouts or hybrid.hybrid_softmax_layout != "auto":
        return config
    mesh, layouts = config.mesh, hybrid.layouts(config.context.context_parallel_layout)
    if mesh.context_parallel_size == 1 or len(layouts) == 1:
        return config.updated(hybrid_softmax_layout=layouts[0])
    try:
        cluster = cluster or default_cluster(mesh.device_type)
    except ClusterError as error:
        raise ConfigError(
            f"hybrid_softmax_layout is auto: no file under configs/clusters is about this device ({error}); "
            "give --hybrid-softmax-layout zigzag or contiguous"
        ) from error
    costs = layout_seconds(config, cluster)
    return config.updated(hybrid_softmax_layout=min(costs, key=costs.__getitem__))


def with_schedule(config: C, cluster: Cluster | None = None) -> C:
    """Replace the schedule ``auto`` of a delta rule's states by the one predicted fastest, here or
    on a cluster.

    It stays where no cluster file is about this device: the longest document decides then
    (linear/segments.py).
    """
    context, (pp, cp, tp) = config.context, config.mesh.sizes
    given = context.delta_rule_schedule != "auto" or context.context_parallel_method == "none"
    if cp == 1 or not config.delta or given:
        return config
    try:
        cluster = cluster or cluster_of(config)
    except ClusterError:
        return config
    work, plan, _ = cost_inputs(config, pp * cp * tp, cluster, known_documents(config))
    return config.updated(delta_rule_schedule=fastest_schedule(delta_cost(work, plan, cluster, tp)))


method_to_read = partial(fastest_method, steps=False)
"""Chooses the method of a model that only reads and writes."""


def rearranged(config: C, processes: int, entries: int | None) -> tuple[C, str]:
    """Return the configuration with the mesh, micro-batch and method predicted fastest here, and
    why.

    The method and its options stay where they suit; sharding and recomputation stay unless memory
    is short. ``entries`` are those of the tokenizer of a language model's run.

    Raises:
        ConfigError: nothing keeps global_batch_size, with the numbers of processes that would, or
            fits in memory.
    """
    cluster = cluster_of(config)
    complete = config if entries is None else with_vocabulary(config, entries)
    several = list(divided(complete, processes))
    found = rank(several, processes, cluster)
    if not found.candidates and (found.over_memory or found.over_host_memory):
        found = rank(several, processes, cluster, vary=settings)
        if not found.candidates:
            raise ConfigError(nothing_left(found, cluster))
    if not found.candidates:
        batch, full = config.train.global_batch_size, config.mesh.full_world_size
        raise ConfigError(
            f"allow_resize is set, and no mesh of {counted(processes, 'process')} suits the model and keeps "
            f"global_batch_size {batch} of the run for {full}; on {_fitting(complete, processes)} there would be one"
        )
    method, context = config.context.context_parallel_method, config.context

    def keeps_method(one: Candidate) -> bool:
        return (
            one.config.mesh.context_parallel_size == 1
            or one.config.context.context_parallel_method == method
        )

    own = (
        found.candidates
        if method == "auto"
        else list(filter(keeps_method, found.candidates)) or found.candidates
    )
    best = own[0].config
    if not suits(replace(best, context=context), processes):
        context = best.context
    parts: Any = {
        name: getattr(best, name) for name in ("mesh", "train", "data_parallel", "recompute")
    }
    return replace(config, context=context, **parts), (
        f"predicted to take {duration(own[0].prediction.time)} per iteration on {cluster.name}, the least of {len(own)}"
    )


def divided(config: C, processes: int) -> Iterator[C]:
    """Yield every mesh with the largest micro-batch up to the configured one that keeps
    global_batch_size.

    A pipeline may need more micro-batches: there, every smaller one too.
    """
    batch = config.train.global_batch_size or 1
    for one in arrangements(config, processes):
        dp = one.mesh.data_parallel_size(processes)
        if batch % dp == 0:
            most = math.gcd(config.train.micro_batch_size, batch // dp)
            least = 1 if one.mesh.pipeline_model_parallel_size > 1 else most
            for micro in (size for size in range(most, least - 1, -1) if most % size == 0):
                yield one.updated(micro_batch_size=micro)


def _fitting(config: CommonConfig, processes: int) -> str:
    """Return the numbers of processes, whole nodes of them, that some mesh with the configured
    method suits.
    """
    node, full = (
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        config.mesh.full_world_size or processes,
    )
    step = node if processes % node == 0 else 1
    sizes = range(step, max(full, processes) + 1, step)

    def fits(size: int) -> bool:
        return any(suits(one, size) for one in divided(config, size))

    return ", ".join(str(size) for size in sizes if fits(size)) or "more"


def combine_prediction_and_profile(
    predicted: Sequence[float], profiled: Sequence[float]
) -> list[float]:
    """Return candidates' seconds by prediction and profile together, weighed by the inverse squares
    of their errors.

    Of predictions the ratios count: by how much all are off is found from the profiles.
    """
    share = PROFILED**-2 / (PROFILED**-2 + PREDICTED**-2)
    pairs = [
        (math.log(said), math.log(real)) for said, real in zip(predicted, profiled, strict=True)
    ]
    off = fmean(real - said for said, real in pairs)
    return [math.exp(share * real + (1 - share) * (said + off)) for said, real in pairs]


PLANNER = Planner(method=fastest_method, settings=(with_layout, with_schedule), mesh=rearranged)
"""Chooses for a run that trains."""
READER = PLANNER._replace(method=method_to_read)
"""Chooses for a model that only reads and writes."""
