"""Configurations derived from a run's: completed as it starts, to save, on another mesh, and as it was trained."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from data.text.blend import MockTokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from model.config import DecoderConfig
from model.parts.settings import RotaryConfig
from parallel.context.config import ContextConfig
from parallel.data import DataParallelConfig
from parallel.mesh import SIZES
from parallel.pipeline.stages import PipelineConfig
from runtime.together import from_first, is_first, raise_together
from train.config.common import CommonConfig
from train.config.entries import Config
from train.config.fields import config_fields
from train.config.flags import load
from train.config.sizes import validate_entries, validate_hybrid, validate_mesh, validate_method
from train.float8 import Float8Config

CONFIG = "config.toml"
IMPORTED = "imported_from"
"""A key of a checkpoint's ``extra``: the model came from Hugging Face, and no run has trained it."""
C = TypeVar("C", bound=CommonConfig)
Method = Callable[[CommonConfig, int], tuple[ContextConfig, str]]
"""A configuration and its processes -> the method of context parallelism, with a line that says why."""


def complete(config: Config, entries: int, choose: Method, ways: Callable[[Config], Config]) -> Config:
    """Return ``config`` complete for a tokenizer of ``entries`` entries, and print what was chosen; collective.

    ``choose`` is asked for a method that is auto, ``ways`` for what is left open then: both are the planner's. A
    sequence longer than rope reaches is noted, and so is a tokenizer of more entries than the model.

    With balance_over dp_cp, data-parallel ranks are context-parallel ones in it, as they are in the mesh. Raises
    UserError: the vocabulary has fewer entries, or a choice cannot be made.
    """
    with raise_together():
        config = with_vocabulary(with_joined_ranks(config, dist.get_world_size()), entries)
    if is_first() and (note := beyond_vocabulary(config.model.vocabulary, entries)):
        print(note, flush=True)
    config = with_rope_length(config)
    if is_first() and (note := beyond_rope(config)):
        print(note, flush=True)
    config = with_method(config, dist.get_world_size(), choose)
    return from_first(lambda: ways(config))  # all ranks the same, whatever their GPUs and files are


def tokenizer_of(config: Config) -> Tokenizer | MockTokenizer:
    """Load a run's tokenizer; for mock_data return one of vocab_size entries. Raises DataError: no file, or damaged."""
    if config.data.mock_data:
        return MockTokenizer(config.model.vocabulary)
    return load_tokenizer(str(config.data.tokenizer_model))


def with_joined_ranks(config: C, world_size: int) -> C:
    """Return the configuration with the data-parallel ranks among the context-parallel ones, if balance_over is dp_cp.

    Their micro-batches become one, so that a step has the same samples. Applied again, it changes nothing.
    """
    mesh = config.mesh.joined(world_size)
    times = mesh.context_parallel_size // config.mesh.context_parallel_size
    train = replace(config.train, micro_batch_size=times * config.train.micro_batch_size)
    return replace(config, mesh=mesh, train=train)


def with_vocabulary(config: Config, entries: int) -> Config:
    """Return the configuration, by default with the tokenizer's vocabulary.

    A tokenizer may have more entries than the model, as Gemma 3 1B's has: data that uses one of these is refused.
    """
    size = config.model.vocab_size
    validate_entries(size or entries, config.mesh.tensor_model_parallel_size)
    return replace(config, model=replace(config.model, vocab_size=size or entries))


def beyond_vocabulary(size: int, entries: int) -> str | None:
    """Return a note if a tokenizer has more entries than the model."""
    if entries <= size:
        return None
    return (
        f"note: the tokenizer has {entries} entries and the model's vocab_size is {size}; data with an id of {size} or "
        "more is refused"
    )


def with_rope_length(config: Config) -> Config:
    """Return the configuration with a length for dynamic scaling of rope, the run's by default: no rank sees all."""
    return replace(config, model=config.model.with_rope_length(config.train.seq_length))


def rope_flags(config: Config) -> list[str]:
    """Return the flags that scale rope to sequences beyond its reach; none if it reaches them.

    The factor grows by as much as the length is beyond the reach: LLaMA 3.1's 8, which reaches 131,072 positions, is 32
    for 524,288.
    """
    model, length = config.model, config.train.seq_length
    reach, rope = model.reach, model.rope
    if not 0 < reach < length or rope is None:
        return []
    kind = rope.rope_scaling_type
    trained = rope.rope_scaling_original_max_position_embeddings or model.max_position_embeddings or 0
    factor = (rope.rope_scaling_factor or 1) * length / reach
    factor = math.ceil(round(1e4 * factor, 3)) / 1e4  # of few digits, and not below
    flags = [f"--rope-scaling-type {kind or 'yarn'}"]
    if kind != "linear":
        flags.append(f"--rope-scaling-original-max-position-embeddings {trained}")
    flags.append(f"--rope-scaling-factor {factor:g}")
    if trained * factor < length:
        flags.append(f"--max-position-embeddings {length}")
    return flags


def beyond_rope(config: Config) -> str | None:
    """Return a note if the sequences are longer than the model is meant for and its scaling of rope reaches."""
    flags = rope_flags(config)
    if not flags:
        return None
    length, reach = config.train.seq_length, config.model.reach
    return (
        f"note: seq_length {length} is {length / reach:.3g} times the {reach} positions that the model and its rope "
        f"reach; scale rope with {' '.join(flags)}, or set --max-position-embeddings if it is trained for more"
    )


def with_method(config: C, world_size: int, choose: Method) -> C:
    """Replace the method ``auto`` by that of the resumed run, else by the chosen one.

    Collective; the first rank chooses. Raises the errors of ``choose``.
    """
    if config.context.context_parallel_method != "auto":
        return config
    context, line = from_first(lambda: _method(config, world_size, choose))
    if is_first():
        print(line, flush=True)
    return replace(config, context=context)


def _method(config: CommonConfig, world_size: int, choose: Method) -> tuple[ContextConfig, str]:
    """Return the method of the run that is resumed on the same mesh, or the chosen one, with a line that says why."""
    earlier = Path(config.checkpoint.load or "") / CONFIG
    if config.checkpoint.load is not None and not config.checkpoint.finetune and earlier.exists():
        before = load(type(config), earlier)
        alike = (before.mesh.joined(world_size), before.sequence_length) == (config.mesh, config.sequence_length)
        if alike and before.context.context_parallel_method != "auto":
            if isinstance(config, Config):
                validate_hybrid(replace(config, context=before.context))
            return before.context, f"context parallelism: {before.context.title}, as {earlier} has it"
    return choose(config, world_size)


def config_to_save(config: C, asked: C) -> C:
    """Return the configuration to write: another run may have other processes to lay out and join, and lengths."""
    kept: Any = {name: getattr(asked, name) for name in ("mesh", "train", "data_parallel", "recompute")}
    if isinstance(config, Config) and isinstance(asked, Config):
        kept["hybrid"] = asked.hybrid
        kept["context"] = replace(config.context, delta_rule_schedule=asked.context.delta_rule_schedule)
        if isinstance(config.model, RotaryConfig) and isinstance(asked.model, RotaryConfig):
            kept["model"] = replace(config.model, rope_scaling_seq_length=asked.model.rope_scaling_seq_length)
    if asked.mesh.joined(dist.get_world_size()) != config.mesh:
        kept["context"] = asked.context
    return replace(config, **kept)


def default_method(model: DecoderConfig) -> Literal["striped", "zigzag", "lasp"]:
    """Return the method of context parallelism of a kind of model for which nobody has named one."""
    default: Literal["striped", "zigzag"] = "zigzag" if model.delta_rule else "striped"  # no state passes along it
    return "lasp" if model.linear_attention else default


def fitted(
    config: Config,
    processes: int,
    method: str | None,
    length: int | None = None,
    **sizes: int,
) -> Config:
    """Return a run's configuration without training, on another mesh of ``processes``.

    A step has one sequence, by default as long as the run's, for each data-parallel rank and pipeline stage.

    Args:
        method: of context parallelism, which may be auto; by default the run's own on as many ranks, else striped, or
            lasp of a model with linear attention, zigzag of one with a delta rule.
        sizes: those of the mesh, all that ``parallel.mesh.SIZES`` names.

    Raises UserError: sizes that do not fit the processes or the model.
    """
    pp, cp, tp = (sizes[name] for name in SIZES)
    device = config.mesh.device if torch.cuda.is_available() else "auto"
    mesh = replace(config.mesh, **sizes, balance_over="cp", device=device)  # type: ignore[arg-type]
    context, own = config.context, config.context.context_parallel_method
    if cp == 1 and method in (None, "auto"):
        context = ContextConfig(context_parallel_method="none")
    elif method == "auto":
        context = ContextConfig(context_parallel_method="auto", cluster=context.cluster)
    elif cp != config.mesh.context_parallel_size or own == "auto" or method not in (None, own):
        named = config_fields(Config)["context_parallel_method"].convert(method or default_method(config.model))
        context = ContextConfig(context_parallel_method=named)
    found = replace(
        config,
        mesh=mesh,
        context=context,
        pipeline=PipelineConfig(),
        data_parallel=DataParallelConfig(),
        recompute=replace(config.recompute, recompute_granularity="none", recompute_offload=False),
        data=replace(config.data, reset_attention_mask=False),
        float8=Float8Config(),
        train=replace(
            config.train,
            seq_length=length or config.train.seq_length,
            micro_batch_size=1,
            global_batch_size=pp * max(1, processes // (cp * tp * pp)),
        ),
    )
    validate_method(found)
    validate_mesh(found, processes)
    return found


def config_as_trained(config: Config, extra: Mapping[str, Any]) -> Config:
    """Return a run's configuration with the length of rope that its checkpoint, with this ``extra``, was trained at.

    A model that no run has trained computes in bfloat16 on cuda, since flash kernels take nothing wider.
    """
    if IMPORTED not in extra:
        return with_rope_length(config)
    return replace(config, train=replace(config.train, bf16=config.train.bf16 or config.mesh.device_type == "cuda"))
