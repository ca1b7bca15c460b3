"""Settings that a run leaves to the planner: method and layout ``auto``, and the mesh under ``--allow-resize``.

A run on other processes than its mesh's sizes are for goes on with the same global batch and samples.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch.distributed as dist

from parallel.context import ContextConfig
from planner.cluster import Cluster, ClusterError, default_cluster, endless, load_cluster
from planner.delta_cost import fastest_schedule
from planner.levers import settings
from planner.search import Candidate, arrangements, cost_inputs, nothing_left, rank, suits
from planner.step_cost import delta_cost
from planner.workload import known_documents, layout_seconds
from runtime.errors import UserError
from runtime.processes import launched_world_size, process_group
from runtime.progress import counted, duration
from runtime.together import from_first, is_first, raise_together
from train.config.common import CommonConfig
from train.config.derive import CONFIG, tokenizer_of, with_vocabulary
from train.config.entries import Config
from train.config.flags import ConfigError, read_toml

C = TypeVar("C", bound=CommonConfig)
PREDICTED, PROFILED = 0.10, 0.036
"""Errors of predicted seconds and of those of a few profiled iterations: standard deviations of their logarithms within
a setting of ``bench/results/choices-amd-epyc-2-cores.md``, on 2026-11-23."""


def fastest_method(config: CommonConfig, world_size: int, *, steps: bool = True) -> tuple[ContextConfig, str]:
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
    chosen = with_schedule(best.config, cluster) if isinstance(best.config, Config) else best.config
    return chosen.context, (
        f"context parallelism: {best.config.context.title}, predicted to take {duration(best.prediction.time)} per "
        f"iteration on {cluster.name}, the least of {others + 1}"
    )


def cluster_of(config: CommonConfig) -> Cluster:
    """Return the cluster that is named or, with as many processes per node as launched, the one at hand.

    Raises:
        ClusterError: its file is invalid, or none is about this device.
    """
    named, per_node = config.context.cluster, config.mesh.context_ranks_per_node
    cluster = default_cluster(config.mesh.device_type) if named is None else load_cluster(named)
    if named is None and per_node is not None:
        cluster = replace(cluster, gpus_per_node=per_node * config.mesh.tensor_model_parallel_size)
    return cluster


def with_layout(config: Config, cluster: Cluster | None = None) -> Config:
    """Replace the layout ``auto`` of a hybrid's softmax layers by the one predicted faster, here or on a cluster.

    Raises:
        ConfigError: there are two to choose from, and no cluster file matches this device.
    """
    model, mesh, hybrid = config.model, config.mesh, config.hybrid
    if not model.own_softmax_layout or hybrid.hybrid_softmax_layout != "auto":
        return config
    layouts = hybrid.layouts(config.context.context_parallel_layout)
    if mesh.context_parallel_size == 1 or len(layouts) == 1:
        return replace(config, hybrid=replace(hybrid, hybrid_softmax_layout=layouts[0]))
    try:
        cluster = cluster or default_cluster(mesh.device_type)
    except ClusterError as error:
        raise ConfigError(
            f"hybrid_softmax_layout is auto: no file under configs/clusters is about this device ({error}); "
            "give --hybrid-softmax-layout zigzag or contiguous"
        ) from error
    costs = layout_seconds(config, cluster)
    layout = min(costs, key=costs.__getitem__)
    return replace(config, hybrid=replace(hybrid, hybrid_softmax_layout=layout))


def with_schedule(config: Config, cluster: Cluster | None = None) -> Config:
    """Replace the schedule ``auto`` of a delta rule's states by the one predicted fastest, here or on a cluster.

    It stays where no cluster file is about this device: the longest document decides then (linear/segments.py).
    """
    context, (pp, cp, tp) = config.context, config.mesh.sizes
    given = context.delta_rule_schedule != "auto" or context.context_parallel_method == "none"
    if cp == 1 or not config.model.delta_rule or given:
        return config
    try:
        cluster = cluster or cluster_of(config)
    except ClusterError:
        return config
    work, plan, _ = cost_inputs(config, pp * cp * tp, cluster, known_documents(config))
    schedule = fastest_schedule(delta_cost(work, plan, cluster, tp))
    return replace(config, context=replace(context, delta_rule_schedule=schedule))


def with_layout_and_schedule(config: Config, cluster: Cluster | None = None) -> Config:
    """Replace what ``auto`` leaves open once the method is known: ``with_layout`` and ``with_schedule``."""
    return with_schedule(with_layout(config, cluster), cluster)


method_to_read = partial(fastest_method, steps=False)
"""Chooses the method of a model that only reads and writes."""


@contextmanager
def fitted_to_world(asked: C, validate: Callable[[C, int], None]) -> Iterator[tuple[C, C]]:
    """Yield the validated configuration for the processes at hand, and the asked one with its full_world_size.

    Without allow_resize the two have the same mesh. With it the processes join, and the first one chooses for all.

    Raises:
        UserError: as ``validate``; no mesh keeps the global batch, or fits in memory; no cluster file is about this
            device.
    """
    processes = launched_world_size()
    if not asked.mesh.allow_resize:
        try:
            validate(asked, processes)
        except UserError as error:
            full = recorded(asked) or processes
            if full == processes or not suits(asked, full, validate):
                raise  # the number of processes is not what is wrong
            raise ConfigError(
                f"{error}; or give --allow-resize: the run is for {counted(full, 'process')}, and the planner "
                "arranges these"
            ) from None
        yield (_for_processes(asked, processes),) * 2
        return
    timeout = timedelta(minutes=asked.mesh.distributed_timeout_minutes)
    with nullcontext() if dist.is_initialized() else process_group(asked.mesh.backend, timeout):
        full, config, line = from_first(lambda: _chosen(asked, processes, validate))
        with raise_together():
            validate(config, processes)
        if is_first() and line:
            print(line, flush=True)
        yield config, _for_processes(asked, full)


def _for_processes(config: C, full: int) -> C:
    """Return the configuration with the number of processes that its sizes are for."""
    return replace(config, mesh=replace(config.mesh, full_world_size=full))


def recorded(config: CommonConfig) -> int | None:
    """Return the full_world_size in the config.toml of the run that ``--load`` goes on with; None if there is none."""
    load = config.checkpoint.load
    file = Path(load or "") / CONFIG
    if load is None or config.checkpoint.finetune or not file.is_file():
        return None
    return read_toml(type(config), file).get("full_world_size")


def _chosen(asked: C, processes: int, validate: Callable[[C, int], None]) -> tuple[int, C, str]:
    """Choose for these processes: return full_world_size, the configuration, and a line if its mesh is another."""
    full = asked.mesh.full_world_size or recorded(asked)
    if full is None and not asked.checkpoint.finetune and (Path(asked.checkpoint.load or "") / CONFIG).is_file():
        raise ConfigError(
            f"allow_resize is set, and the config.toml in {asked.checkpoint.load} does not say for how many processes "
            "its sizes and batch are; give --full-world-size N"
        )
    full = full or processes
    if full == processes:
        return full, _for_processes(asked, full), ""
    validate(asked, full)
    batch = asked.train.batch_size(asked.mesh.data_parallel_size(full))
    wanted = replace(_for_processes(asked, full), train=replace(asked.train, global_batch_size=batch))
    config, why = rearranged(wanted, processes)
    pp, cp, tp = config.mesh.sizes
    dp, micro = config.mesh.data_parallel_size(processes), config.train.micro_batch_size
    line = (
        f"resized from {full} to {counted(processes, 'process')}: pipeline {pp} x data {dp} x context {cp} "
        f"x tensor {tp}, {counted(config.train.micro_batches(dp), 'micro-batch')} of {micro} "
        f"for global_batch_size {batch}; {why}"
    )
    return full, config, line


def rearranged(config: C, processes: int) -> tuple[C, str]:
    """Return the configuration with the mesh, micro-batch and method predicted fastest here, and why.

    The method and its options stay where they suit; sharding and recomputation stay unless memory is short.

    Raises:
        ConfigError: nothing keeps global_batch_size, with the numbers of processes that would, or fits in memory.
    """
    cluster = cluster_of(config)
    known: Any = config
    if isinstance(config, Config):
        known = with_vocabulary(config, tokenizer_of(config).vocab_size)
    several = list(divided(known, processes))
    found = rank(several, processes, cluster)
    if not found.candidates and (found.over_memory or found.over_host_memory):
        found = rank(several, processes, cluster, vary=settings)
        if not found.candidates:
            raise ConfigError(nothing_left(found, cluster))
    if not found.candidates:
        batch, full = config.train.global_batch_size, config.mesh.full_world_size
        raise ConfigError(
            f"allow_resize is set, and no mesh of {counted(processes, 'process')} suits the model and keeps "
            f"global_batch_size {batch} of the run for {full}; on {_fitting(known, processes)} there would be one"
        )
    method, context = config.context.context_parallel_method, config.context

    def keeps_method(one: Candidate) -> bool:
        return one.config.mesh.context_parallel_size == 1 or one.config.context.context_parallel_method == method

    own = found.candidates if method == "auto" else list(filter(keeps_method, found.candidates)) or found.candidates
    best = own[0].config
    if not suits(replace(best, context=context), processes):
        context = best.context
    parts: Any = {name: getattr(best, name) for name in ("mesh", "train", "data_parallel", "recompute")}
    return replace(config, context=context, **parts), (
        f"predicted to take {duration(own[0].prediction.time)} per iteration on {cluster.name}, the least of {len(own)}"
    )


def divided(config: C, processes: int) -> Iterator[C]:
    """Yield every mesh with the largest micro-batch up to the configured one that keeps global_batch_size.

    A pipeline may need more micro-batches: there, every smaller one too.
    """
    batch = config.train.global_batch_size or 1
    for one in arrangements(config, processes):
        dp = one.mesh.data_parallel_size(processes)
        if batch % dp == 0:
            most = math.gcd(config.train.micro_batch_size, batch // dp)
            least = 1 if one.mesh.pipeline_model_parallel_size > 1 else most
            for micro in (size for size in range(most, least - 1, -1) if most % size == 0):
                yield replace(one, train=replace(one.train, micro_batch_size=micro))


def _fitting(config: CommonConfig, processes: int) -> str:
    """Return the numbers of processes, whole nodes of them, that some mesh with the configured method suits."""
    node, full = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), config.mesh.full_world_size or processes
    step = node if processes % node == 0 else 1
    sizes = range(step, max(full, processes) + 1, step)

    def fits(size: int) -> bool:
        return any(suits(one, size) for one in divided(config, size))

    return ", ".join(str(size) for size in sizes if fits(size)) or "more"


def combine_prediction_and_profile(predicted: Sequence[float], profiled: Sequence[float]) -> list[float]:
    """Return candidates' seconds by prediction and profile together, weighed by the inverse squares of their errors.

    Of predictions the ratios count: by how much all are off is found from the profiles.
    """
    share = PROFILED**-2 / (PROFILED**-2 + PREDICTED**-2)
    pairs = [(math.log(said), math.log(real)) for said, real in zip(predicted, profiled, strict=True)]
    off = fmean(real - said for said, real in pairs)
    return [math.exp(share * real + (1 - share) * (said + off)) for said, real in pairs]
