"""Configurations derived from another one: joined ranks, a vocabulary, rope, another mesh."""

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
"""A key of a checkpoint's ``extra``: the model was imported from Hugging Face, not trained by a
run."""
C = TypeVar("C", bound=CommonConfig)


def with_joined_ranks(config: C, world_size: int) -> C:
    """Return the configuration whose context-parallel ranks include the data-parallel ones.

    This is so if balance_over is dp_cp; otherwise nothing changes. The micro-batches of the joined
    ranks become one, so that a step has the same samples. Applied again, it changes nothing.
    """
    mesh = config.mesh.joined(world_size)
    joined = mesh.context_parallel_size // config.mesh.context_parallel_size
    return replace(config, mesh=mesh).updated(
        micro_batch_size=joined * config.train.micro_batch_size
    )


def with_vocabulary(config: C, entries: int) -> C:
    """Return the configuration with the tokenizer's vocabulary size, unless it has one.

    A tokenizer may have more entries than the model, like that of Gemma 3 1B; data that uses one of
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
        f"note: the tokenizer has {entries} entries and the model's vocab_size is {size}; data "
        f"with an id of {size} or more is refused"
    )


def with_rope_length(config: C) -> C:
    """Return the configuration with the length that dynamic rope scaling uses.

    It is the run's sequence length by default: a rank has only its shard and cannot
    measure it.
    """
    if not config.rotates:
        return config
    return replace(config, model=config.model.with_rope_length(config.sequence_length))


def rope_flags(config: CommonConfig) -> list[str]:
    """Return the flags that scale rope to the sequence length; none if it reaches that far.

    The factor grows in proportion to the length: LLaMA 3.1's factor of 8 reaches 131,072 positions,
    so that 524,288 positions take 32.
    """
    if not config.rotates:
        return []
    model = config.model
    rope = model.rope
    length = config.sequence_length
    if not 0 < model.reach < length or rope is None:
        return []

    kind = rope.rope_scaling_type
    trained = (
        rope.rope_scaling_original_max_position_embeddings or model.max_position_embeddings or 0
    )
    factor = (rope.rope_scaling_factor or 1) * length / model.reach
    factor = math.ceil(round(1e4 * factor, 3)) / 1e4  # rounded up to four digits

    flags = [f"--rope-scaling-type {kind or 'yarn'}"]
    if kind != "linear":
        flags.append(f"--rope-scaling-original-max-position-embeddings {trained}")
    flags.append(f"--rope-scaling-factor {factor:g}")
    if trained * factor < length:
        flags.append(f"--max-position-embeddings {length}")
    return flags


def beyond_rope(config: CommonConfig) -> str | None:
    """Return a note if the sequences are longer than the model and its scaled rope reach."""
    flags = rope_flags(config)
    if not flags:
        return None
    length = config.sequence_length
    reach = config.model.reach
    return (
        f"note: seq_length {length} is {length / reach:.3g} times the {reach} positions that the "
        f"model and its rope reach; scale rope with {' '.join(flags)}, or set "
        "--max-position-embeddings if it is trained for more"
    )


def default_method(model: DecoderConfig) -> Literal["striped", "zigzag", "lasp"]:
    """Return the method of context parallelism for a model, if the user names none.

    Striped balances causal attention best, but a rank of it holds every n-th token, and a delta
    rule needs consecutive ones.
    """
    if model.linear_attention:
        return "lasp"
    return "zigzag" if model.delta_rule else "striped"


def fitted(
    config: Config,
    processes: int,
    method: str | None,
    length: int | None = None,
    **sizes: int,
) -> Config:
    """Return a run's configuration for inference, on another mesh of ``processes``.

    A step has one sequence, by default as long as the run's, for each data-parallel rank and
    pipeline stage.

    Args:
        method: of context parallelism, may be auto; by default that of the run on the same number
            of ranks, else striped, lasp for a model with linear attention, zigzag for one with a
            delta rule.
        sizes: the mesh's sizes, all that ``parallel.mesh.SIZES`` names.

    Raises UserError: sizes that do not fit the processes or the model.
    """
    pp, cp, tp = (sizes[name] for name in SIZES)
    context = config.context
    run_method = context.context_parallel_method
    if cp == 1 and method in (None, "auto"):
        context = ContextConfig(context_parallel_method="none")
    elif method == "auto":
        context = ContextConfig(context_parallel_method="auto", cluster=context.cluster)
    elif (
        cp != config.mesh.context_parallel_size
        or run_method == "auto"
        or method not in (None, run_method)
    ):
        field = config_fields(Config)["context_parallel_method"]
        chosen = field.convert(method or default_method(config.model))
        context = ContextConfig(context_parallel_method=chosen)

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
    """Return a run's configuration with the rope length that its checkpoint was trained at.

    ``extra`` is the checkpoint's. An imported model computes in bfloat16 on cuda, since flash
    kernels take no float32.
    """
    if IMPORTED not in extra:
        return with_rope_length(config)
    return config.updated(bf16=config.train.bf16 or config.mesh.device_type == "cuda")
