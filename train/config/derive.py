"""Configurations derived from another: with joined ranks, a vocabulary, a length of rope, or on
another mesh.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from model.config import DecoderConfig
from parallel.context.config import ContextConfig
from parallel.data import DataParallelConfig
from parallel.mesh import SIZES
from parallel.pipeline.stages import PipelineConfig
from train.config.common import CommonConfig
from train.config.entries import Config
from train.config.fields import config_fields
from train.config.sizes import validate_entries, validate_mesh, validate_method
from train.float8 import Float8Config

CONFIG = "config.toml"
IMPORTED = "imported_from"
"""A key of a checkpoint's ``extra``: the model came from Hugging Face, and no run has trained it.
"""
C = TypeVar("C", bound=CommonConfig)


def with_joined_ranks(config: C, world_size: int) -> C:
    """Return the configuration with the data-parallel ranks among the context-parallel ones, if
    balance_over is dp_cp.

    Their micro-batches become one, so that a step has the same samples. Applied again, it changes
    nothing.
    """
    mesh = config.mesh.joined(world_size)
    times = mesh.context_parallel_size // config.mesh.context_parallel_size
    return replace(config, mesh=mesh).updated(
        micro_batch_size=times * config.train.micro_batch_size
    )


def with_vocabulary(config: C, entries: int) -> C:
    """Return the configuration, by default with the tokenizer's vocabulary.

    A tokenizer may have more entries than the model, as Gemma 3 1B's has: data that uses one of
    these is refused.
    """
    size = config.model.vocab_size
    validate_entries(size or entries, config.mesh.tensor_model_parallel_size)
    return config.updated(vocab_size=size or entries)


def beyond_vocabulary(size: int, entries: int) -> str | None:
    """Return a note if a tokenizer has more entries than the model."""
    if entries <= size:
        return None
    return (
        f"note: the tokenizer has {entries} entries and the model's vocab_size is {size}; data with an id of {size} or "
        "more is refused"
    )


def with_rope_length(config: C) -> C:
    """Return the configuration with a length for dynamic scaling of rope, the run's by default: no
    rank sees all.
    """
    if not config.rotates:
        return config
    return replace(config, model=config.model.with_rope_length(config.sequence_length))


def rope_flags(config: CommonConfig) -> list[str]:
    """Return the flags that scale rope to sequences beyond its reach; none if it reaches them.

    The factor grows by as much as the length is beyond the reach: LLaMA 3.1's 8, which reaches
    131,072 positions, is 32 for 524,288.
    """
    if not config.rotates:
        return []
    model, length = config.model, config.sequence_length
    reach, rope = model.reach, model.rope
    if not 0 < reach < length or rope is None:
        return []
    kind = rope.rope_scaling_type
    trained = (
        rope.rope_scaling_original_max_position_embeddings or model.max_position_embeddings or 0
    )
    factor = (rope.rope_scaling_factor or 1) * length / reach
    factor = math.ceil(round(1e4 * factor, 3)) / 1e4  # of few digits, and not below
    flags = [f"--rope-scaling-type {kind or 'yarn'}"]
    if kind != "linear":
        flags.append(f"--rope-scaling-original-max-position-embeddings {trained}")
    flags.append(f"--rope-scaling-factor {factor:g}")
    if trained * factor < length:
        flags.append(f"--max-position-embeddings {length}")
    return flags


def beyond_rope(config: CommonConfig) -> str | None:
    """Return a note if the sequences are longer than the model is meant for and its scaling of rope
    reaches.
    """
    flags = rope_flags(config)
    if not flags:
        return None
    length, reach = config.sequence_length, config.model.reach
    return (
        f"note: seq_length {length} is {length / reach:.3g} times the {reach} positions that the model and its rope "
        f"reach; scale rope with {' '.join(flags)}, or set --max-position-embeddings if it is trained for more"
    )


def default_method(model: DecoderConfig) -> Literal["striped", "zigzag", "lasp"]:
    """Return the method of context parallelism of a kind of model for which nobody has named one."""
    default: Literal["striped", "zigzag"] = (
        "zigzag" if model.delta_rule else "striped"
    )  # no state passes along it
    return "lasp" if model.linear_attention else default


def fitted(
    config: Config,
    processes: int,
    method: str | None,
    length: int | None = None,
    **sizes: int,
) -> Config:
    """Return a run's configuration without training, on another mesh of ``processes``.

    A step has one sequence, by default as long as the run's, for each data-parallel rank and
    pipeline stage.

    Args:
        method: of context parallelism, which may be auto; by default the run's own on as many
            ranks, else striped, or lasp of a model with linear attention, zigzag of one with a
            delta rule.
        sizes: those of the mesh, all that ``parallel.mesh.SIZES`` names.

    Raises UserError: sizes that do not fit the processes or the model.
    """
    pp, cp, tp = (sizes[name] for name in SIZES)
    context, own = config.context, config.context.context_parallel_method
    if cp == 1 and method in (None, "auto"):
        context = ContextConfig(context_parallel_method="none")
    elif method == "auto":
        context = ContextConfig(context_parallel_method="auto", cluster=context.cluster)
    elif cp != config.mesh.context_parallel_size or own == "auto" or method not in (None, own):
        named = config_fields(Config)["context_parallel_method"].convert(
            method or default_method(config.model)
        )
        context = ContextConfig(context_parallel_method=named)
    sections: Any = {
        "pipeline": PipelineConfig(),
        "data_parallel": DataParallelConfig(),
        "float8": Float8Config(),
    }
    fitting = replace(config, context=context, **sections).updated(
        **sizes,
        balance_over="cp",
        device=config.mesh.device if torch.cuda.is_available() else "auto",
        recompute_granularity="none",
        recompute_offload=False,
        reset_attention_mask=False,
        seq_length=length or config.train.seq_length,
        micro_batch_size=1,
        global_batch_size=pp * max(1, processes // (cp * tp * pp)),
    )
    validate_method(fitting)
    validate_mesh(fitting, processes)
    return fitting


def config_as_trained(config: Config, extra: Mapping[str, Any]) -> Config:
    """Return a run's configuration with the length of rope that its checkpoint, with this
    ``extra``, was trained at.

    A model that no run has trained computes in bfloat16 on cuda, since flash kernels take nothing
    wider.
    """
    if IMPORTED not in extra:
        return with_rope_length(config)
    return config.updated(bf16=config.train.bf16 or config.mesh.device_type == "cuda")
