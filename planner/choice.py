"""Choose what a configuration leaves to ``auto``: the method of context parallelism, and a hybrid's layout."""

from dataclasses import replace
from functools import partial

from parallel.context import ContextConfig
from planner.cluster import Cluster, ClusterError, default_cluster, endless, load_cluster
from planner.ranking import nothing_left
from planner.search import rank
from planner.workload import fastest, layout_costs
from runtime.progress import duration
from train.config.common import CommonConfig
from train.config.complete import Choices
from train.config.entries import Config
from train.config.flags import ConfigError


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
    return best.config.context, (
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
    if model.softmax_every is None or hybrid.hybrid_softmax_layout != "auto":
        return config
    if mesh.context_parallel_size == 1 or len(hybrid.layouts) == 1:
        return replace(config, hybrid=replace(hybrid, hybrid_softmax_layout="contiguous"))
    try:
        cluster = cluster or default_cluster(mesh.device_type)
    except ClusterError as error:
        raise ConfigError(
            f"hybrid_softmax_layout is auto: no file under configs/clusters is about this device ({error}); "
            "give --hybrid-softmax-layout zigzag or contiguous"
        ) from error
    layout = fastest(layout_costs(config, cluster)).layout
    return replace(config, hybrid=replace(hybrid, hybrid_softmax_layout=layout))


CHOICES = Choices(fastest_method, with_layout)
"""Of a run that trains."""
READING = CHOICES._replace(method=partial(fastest_method, steps=False))
"""Of a model that only reads and writes."""
