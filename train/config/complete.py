"""Complete a configuration as a run starts: the vocabulary, the method, a hybrid's layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from data.text.megatron import MockTokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from parallel.context import ContextConfig
from runtime.together import from_first, is_first, raise_together
from train.config import diffusion
from train.config.common import CommonConfig, with_joined_ranks
from train.config.derive import with_rope_length
from train.config.entries import Config
from train.config.flags import ConfigError
from train.config.language import load_config
from train.config.sizes import validate_entries

CONFIG = "config.toml"
C = TypeVar("C", bound=CommonConfig)
Method = Callable[[CommonConfig, int], tuple[ContextConfig, str]]
"""A configuration and its processes -> the method of context parallelism, with a line that says why."""


class Choices(NamedTuple):
    """Functions that choose what a configuration leaves to ``auto``: the planner's."""

    method: Method
    layout: Callable[[Config], Config]
    """Names the layout of a hybrid's softmax layers."""


def complete(config: Config, entries: int, choices: Choices) -> Config:
    """Return ``config`` complete for a tokenizer of ``entries`` entries, and print what was chosen; collective.

    A sequence longer than rope reaches is noted.

    With balance_over dp_cp, data-parallel ranks are context-parallel ones in it, as they are in the mesh.

    Raises:
        UserError: the vocabulary has fewer entries, or a choice cannot be made.
    """
    with raise_together():
        config = with_vocabulary(with_joined_ranks(config, dist.get_world_size()), entries)
    config = with_rope_length(config)
    if is_first() and (note := beyond_rope(config)):
        print(note, flush=True)
    config = with_method(config, dist.get_world_size(), choices.method)
    with raise_together():
        return choices.layout(config)


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
        before = (load_config if isinstance(config, Config) else diffusion.load_config)(earlier)
        alike = (before.mesh.joined(world_size), before.sequence_length) == (config.mesh, config.sequence_length)
        if alike and before.context.context_parallel_method != "auto":
            return before.context, f"context parallelism: {before.context.title}, as {earlier} has it"
    return choose(config, world_size)
