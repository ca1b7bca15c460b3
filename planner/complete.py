"""Complete a configuration as a run starts: the vocabulary, the method, a hybrid's layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from data.text.megatron import MockTokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from parallel.context import ContextConfig
from planner.cluster import Cluster, ClusterError, default_cluster, endless, load_cluster
from planner.ranking import nothing_left
from planner.search import rank
from planner.workload import fastest, layout_costs
from runtime.together import from_first, is_first, raise_together
from runtime.words import duration
from train.config import diffusion
from train.config.common import CommonConfig, with_joined_ranks
from train.config.derive import with_rope_length
from train.config.entries import Config
from train.config.flags import ConfigError
from train.config.language import load_config
from train.config.sizes import validate_entries

CONFIG = "config.toml"
C = TypeVar("C", bound=CommonConfig)


def complete(config: Config, entries: int, *, steps: bool = True) -> Config:
    """Return ``config`` complete for a tokenizer of ``entries`` entries, and print what was chosen; collective.

    Without ``steps`` of training to come, a method need not have the memory for one.

    A sequence longer than rope reaches is noted.

    With balance_over dp_cp, data-parallel ranks are context-parallel ones in it, as they are in the mesh.

    Raises:
        UserError: the vocabulary has fewer entries, no method fits the sizes or memory, or no cluster file matches this
                device.
    """
    with raise_together():
        config = with_vocabulary(with_joined_ranks(config, dist.get_world_size()), entries)
    config = with_rope_length(config)
    if is_first() and (note := beyond_rope(config)):
        print(note, flush=True)
    config = with_method(config, dist.get_world_size(), steps=steps)
    with raise_together():
        return with_layout(config)


def tokenizer_of(config: Config) -> Tokenizer | MockTokenizer:
    """Load a run's tokenizer; for mock_data return one of vocab_size entries. Raises DataError: no file, or damaged."""
    if config.data.mock_data:
        return MockTokenizer(config.model.vocabulary)
    return load_tokenizer(str(config.data.tokenizer_model))


def with_vocabulary(config: Config, entries: int) -> Config:
    """Return the configuration, by default with the tokenizer's vocabulary; ConfigError if its own is too small."""
    size = config.model.vocab_size
    if size is not None and size < entries:
        raise ConfigError(
            f"vocab_size is {size} and the tokenizer has {entries} entries; name the tokenizer that goes with it, or "
            "leave vocab_size out of a new run"
        )
    validate_entries(size or entries, config.mesh.tensor_model_parallel_size)
    return replace(config, model=replace(config.model, vocab_size=size or entries))


def beyond_rope(config: Config) -> str | None:
    """Return a note if the sequences are longer than the model is meant for and its scaling of rope reaches."""
    model, length = config.model, config.train.seq_length
    kind, meant = model.rope_scaling_type, model.max_position_embeddings or 0
    reach = max(meant, model.scaled_length, int(meant * (model.rope_scaling_factor or 1)) if kind == "linear" else 0)
    if not 0 < reach < length or model.position_table is not None:
        return None
    trained = model.rope_scaling_original_max_position_embeddings or meant
    original = "" if kind == "linear" else f" --rope-scaling-original-max-position-embeddings {trained}"
    return (
        f"note: seq_length {length} is {length / reach:.3g} times the {reach} positions that the model and its rope "
        f"reach; scale rope with --rope-scaling-type {kind or 'yarn'}{original} --rope-scaling-factor "
        f"{length / trained:.4g}, or set --max-position-embeddings if it is trained for more"
    )


def config_to_save(config: C, asked: C) -> C:
    """Return the configuration to write: another run may have other processes to lay out and join, and lengths."""
    kept: Any = {name: getattr(asked, name) for name in ("mesh", "train", "data_parallel", "recompute")}
    if isinstance(config, Config) and isinstance(asked, Config):
        kept["hybrid"] = asked.hybrid
        kept["model"] = replace(config.model, rope_scaling_seq_length=asked.model.rope_scaling_seq_length)
    if asked.mesh.joined(dist.get_world_size()) != config.mesh:
        kept["context"] = asked.context
    return replace(config, **kept)


def with_method(config: C, world_size: int, *, steps: bool = True) -> C:
    """Replace the method ``auto`` by that of the resumed run, else by the one predicted fastest.

    Collective; the first rank chooses. Without ``steps`` of training to come, memory is no condition.

    Raises:
        ConfigError: no method fits the sizes or memory.
        ClusterError: the cluster file is invalid, or none matches this device.
    """
    if config.context.context_parallel_method != "auto":
        return config
    context, line = from_first(lambda: _choice(config, world_size, steps))
    if is_first():
        print(line, flush=True)
    return replace(config, context=context)


def _choice(config: CommonConfig, world_size: int, steps: bool) -> tuple[ContextConfig, str]:
    """Choose the method; return it with a line that says why."""
    earlier = Path(config.checkpoint.load or "") / CONFIG
    if config.checkpoint.load is not None and not config.checkpoint.finetune and earlier.exists():
        before = (load_config if isinstance(config, Config) else diffusion.load_config)(earlier)
        alike = (before.mesh.joined(world_size), before.sequence_length) == (config.mesh, config.sequence_length)
        if alike and before.context.context_parallel_method != "auto":
            return before.context, f"context parallelism: {before.context.title}, as {earlier} has it"
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
