"""Derive a configuration from another: for balance_over, a tokenizer, rope, or a new mesh."""

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
"""Key of a checkpoint's ``extra``, set if the model was imported from Hugging Face, not trained by
a run."""
C = TypeVar("C", bound=CommonConfig)


def with_joined_ranks(config: C, world_size: int) -> C:
    """Return the configuration with the data-parallel ranks merged into context parallelism.

    This applies if balance_over is dp_cp; otherwise nothing changes. The micro-batches of the
    merged ranks become one, so that a step has the same samples. A second call changes nothing.
    """
    mesh = config.mesh.joined(world_size)
    joined = mesh.context_parallel_size // config.mesh.context_parallel_size
    return replace(config, mesh=mesh).updated(
        micro_batch_size=joined * config.train.micro_batch_size
    )


def with_vocabulary(config: C, entries: int) -> C:
    """Return the configuration with the tokenizer's vocabulary size, unless one is set already.

    A tokenizer may have more entries than the model, as Gemma 3 1B's does; data with one of the
    extra ids are refused.
    """
    size = config.model.vocab_size
    validate_entries(size or entries, config.mesh.tensor_model_parallel_size)
    return config.updated(vocab_size=size or entries)


def beyond_vocabulary(size: int, entries: int) -> str | None:
    """Return a note if a tokenizer has more entries than the model."""
    if entries <= size:
        return None
    return (
        f"note: the tokenizer has {entries} entries, but the model's vocab_size is {size}; data "
        f"with a token id of {size} or more is refused"
    )


def with_rope_length(config: C) -> C:
    """Return the configuration with the length that dynamic rope scaling uses.

    By default it is the run's sequence length, which a rank could not measure on its shard.
    """
    if not config.rotates:
        return config
    return replace(config, model=config.model.with_rope_length(config.sequence_length))


def rope_flags(config: CommonConfig) -> list[str]:
    """Return the flags that scale rope to the sequence length; empty if no scaling is needed.

    The factor grows in proportion to the length: LLaMA 3.1's factor of 8 reaches 131,072 positions,
    so 524,288 positions need a factor of 32.
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
    """Return a note if the sequences are longer than the scaled rope supports."""
    flags = rope_flags(config)
    if not flags:
        return None
    length = config.sequence_length
    reach = config.model.reach
    return (
        f"note: seq_length {length} is {length / reach:.3g} times the {reach} positions that the "
        f"model and its rope reach; scale rope with {' '.join(flags)}, or set "
        "--max-position-embeddings if the model was trained for more"
    )


def in_one_slice(config: CommonConfig) -> str | None:
    """Return a note if layer_chunk_size is so large that all tokens of a rank are one slice."""
    size = config.recompute.layer_chunk_size
    tokens = config.joined_length * config.sharded_sequences // config.mesh.context_parallel_size
    if not size or size < tokens:
        return None
    return (
        f"note: layer_chunk_size is {size}, but a rank has {tokens} tokens of a micro-batch, so a "
        "layer takes them in one slice and saves no memory; set it to fewer tokens"
    )


def default_method(model: DecoderConfig) -> Literal["striped", "zigzag", "lasp"]:
    """Return the default context-parallel method of a model.

    Striped balances causal attention best, but with it a rank holds every n-th token, and a delta
    rule needs consecutive tokens.
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
    """Return a run's configuration, adapted for inference on another mesh of ``processes``.

    A step has one sequence, by default as long as the run's, for each data-parallel rank and
    pipeline stage.

    Args:
        method: context-parallel method; it may be auto. The default is the run's method if the
            context-parallel size is the same; otherwise lasp for a model with linear attention,
            zigzag for one with a delta rule, and striped for any other.
        sizes: the mesh's sizes, one for each name in ``parallel.mesh.SIZES``.

    Raises UserError if the sizes do not fit the processes or the model.
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
        layer_chunk_size=0,
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

    ``extra`` is the run's state in the checkpoint. An imported model keeps its rope, and computes
    in bfloat16 on cuda, since flash kernels do not support float32.
    """
    if IMPORTED not in extra:
        return with_rope_length(config)
    return config.updated(bf16=config.train.bf16 or config.mesh.device_type == "cuda")
