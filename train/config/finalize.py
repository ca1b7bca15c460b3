"""Finalize a run's configuration: validate it, and choose every value that the user left open.

This happens once, before anything is built, and nothing replaces a field afterwards. A value that
was chosen later could differ between ranks, or between the run and its config.toml.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist

from model.registry import architecture_of
from parallel.context.config import ContextConfig
from parallel.context.methods import METHODS
from runtime.errors import UserError
from runtime.processes import launched_world_size
from runtime.progress import counted
from runtime.together import from_first, is_first, raise_together
from train.config.common import CommonConfig
from train.config.derive import (
    CONFIG,
    beyond_rope,
    beyond_vocabulary,
    in_one_slice,
    with_joined_ranks,
    with_rope_length,
    with_vocabulary,
)
from train.config.fields import config_fields
from train.config.flags import ConfigError, load, read_toml, value_of
from train.config.sizes import validate_hybrid
from train.resume.start import Start, find_start
from train.tasks.task import Task

C = TypeVar("C", bound=CommonConfig)
Method = Callable[[CommonConfig, int], tuple[ContextConfig, str]]
"""Maps a configuration and the number of processes to the context-parallel method, with a line that
gives the reason."""
Validate = Callable[[C, int], None]


class Planner(NamedTuple):
    """The planner's functions, passed in because this folder does not import the planner."""

    method: Method
    """Chooses the context-parallel method if it is "auto"."""
    settings: Sequence[Callable[..., Any]]
    """Functions that choose the other open settings, one after another, after the method."""
    mesh: Callable[[Any, int, int | None], tuple[Any, str]]
    """Chooses a mesh: maps a configuration, a number of processes and the size of the tokenizer's
    vocabulary to the configuration for these processes and the reason for it."""


@dataclass(frozen=True, kw_only=True)
class Final(Generic[C]):
    """A run's final configuration, start and tokenizer, decided before anything is built."""

    config: C
    """The configuration in use: complete, valid, and with the run's schedule."""
    saved: C
    """The configuration to write to config.toml. Values that every start decides again are as the
    user gave them, and settings that concern only this start are left out."""
    start: Start
    """The checkpoint or weights to start from, if any."""
    tokenizer: Any
    """The tokenizer of the data; None if the data are not text."""


def validate_launch(config: C, validate: Validate[C]) -> None:
    """Validate a run for the launched processes, before they form a process group.

    With allow_resize the run's sizes may be for another number of processes, so ``finalize``
    validates the run after it has chosen the mesh.

    Raises UserError under the same conditions as ``validate``.
    """
    processes = launched_world_size()
    if config.mesh.allow_resize:
        return
    try:
        validate(config, processes)
    except UserError as error:
        full = recorded_world_size(config) or processes
        if full == processes or not _is_valid(config, full, validate):
            raise  # the error does not come from the number of processes
        raise ConfigError(
            f"{error}; or give --allow-resize: the run is for {counted(full, 'process')}, and the "
            "planner then finds a mesh for those that were started"
        ) from None


def finalize(requested: C, task: type[Task[C]], planner: Planner) -> Final[C]:
    """Choose every value that a parsed configuration leaves open, and print the choices.

    Collective over all processes; the process group must exist.

    Raises:
        UserError: the task's ``validate`` refuses the run; the tokenizer is missing; no mesh keeps
            the global batch, or fits in memory; a choice cannot be made; or the checkpoint does not
            fit the run.
    """
    with raise_together():
        tokenizer = task.load_tokenizer(requested)
    entries = None if tokenizer is None else tokenizer.vocab_size

    processes = launched_world_size()
    full = processes
    config = requested
    if requested.mesh.allow_resize:  # the first process chooses for all
        full, config, line = from_first(
            lambda: _rearranged(requested, processes, task.validate, planner, entries)
        )
        with raise_together():
            task.validate(config, processes)
        if is_first() and line:
            print(line, flush=True)
    config = complete(config.updated(full_world_size=full), entries, planner)

    start = find_start(config, architecture_of(config.model), from_first(config.contents))
    saved = config_to_save(config, requested.updated(full_world_size=full), dist.get_world_size())
    return Final(
        config=replace(config, optimizer=start.optimizer),
        saved=saved,
        start=start,
        tokenizer=tokenizer,
    )


def complete(config: C, entries: int | None, planner: Planner) -> C:
    """Return the configuration with every open value chosen, and print the choices. Collective.

    ``entries`` is the size of the tokenizer's vocabulary. A note is printed if it is larger than
    the model's, if a sequence is longer than rope supports, or if a slice has all tokens. With
    balance_over dp_cp, the context-parallel ranks of the result include the data-parallel ones, as
    in the mesh.

    Raises UserError if the vocabulary has too few entries for the mesh, or a choice cannot be made.
    """
    notes: list[str | None] = []
    with raise_together():
        config = with_joined_ranks(config, dist.get_world_size())
        if entries is not None:
            config = with_vocabulary(config, entries)
            notes.append(beyond_vocabulary(config.model.vocab_size, entries))
    config = with_rope_length(config)
    for note in filter(None, [*notes, beyond_rope(config), in_one_slice(config)]):
        if is_first():
            print(note, flush=True)
    config = with_method(config, dist.get_world_size(), planner.method)

    def with_settings() -> C:
        chosen = config
        for choose in planner.settings:
            chosen = choose(chosen)
        return chosen

    # The first rank chooses for all, since the choices depend on a machine's GPUs and files.
    return from_first(with_settings)


def with_method(config: C, world_size: int, choose: Method) -> C:
    """Replace the method ``auto`` by the resumed run's method, or by the planner's choice.

    Collective; the first rank chooses. Raises the errors of ``choose``.
    """
    if config.context.context_parallel_method != "auto":
        return config
    context, line = from_first(lambda: _method(config, world_size, choose))
    if is_first():
        print(line, flush=True)
    return replace(config, context=context)


def _method(config: CommonConfig, world_size: int, choose: Method) -> tuple[ContextConfig, str]:
    """Return the context-parallel method and the reason for it.

    A run that resumes on the same mesh with the same length keeps its method, unless its layers now
    take slices and the method does not; otherwise ``choose`` decides.
    """
    checkpoint = config.checkpoint
    file = Path(checkpoint.load or "") / CONFIG
    if checkpoint.load is not None and not checkpoint.finetune and file.exists():
        earlier = load(type(config), file)
        same_mesh = earlier.mesh.joined(world_size) == config.mesh
        same_length = earlier.sequence_length == config.sequence_length
        if same_mesh and same_length and _suits(earlier.context.context_parallel_method, config):
            if config.hybrid_layouts:
                resumed: Any = replace(config, context=earlier.context)
                validate_hybrid(resumed)
            reason = f"context parallelism: {earlier.context.title}, as in {file}"
            return earlier.context, reason
    return choose(config, world_size)


def _suits(method: str, config: CommonConfig) -> bool:
    """Return True if a run can go on with the method of an earlier one, maybe now in slices."""
    if method == "auto":
        return False
    if config.mesh.context_parallel_size == 1 or not config.recompute.layer_chunk_size:
        return True
    return method in METHODS and METHODS[method].takes_slices


def config_to_save(config: C, requested: C, world_size: int) -> C:
    """Return the configuration to write to config.toml, which later starts read.

    That start may have another number of processes or another length, so every choice that depends
    on these is written as the user gave it. Flags that concern only this start are left out:
    finetune, a ``hf:`` folder to load, which only finetune accepts, and the flags that choose
    between two schedules, since checkpoints have the resumed schedule.
    """
    sections: Any = {}
    for name in ("mesh", "train", "data_parallel", "recompute"):
        sections[name] = getattr(requested, name)
    if requested.mesh.joined(world_size) != config.mesh:
        sections["context"] = requested.context

    decided = {}
    for name in config.DECIDED:
        if name in config_fields(config):
            decided[name] = value_of(requested, name)

    checkpoint = config.checkpoint
    return replace(config, **sections).updated(
        **decided,
        override_opt_param_scheduler=False,
        use_checkpoint_opt_param_scheduler=False,
        finetune=False,
        allow_changed=(),
        load=checkpoint.load if checkpoint.hugging_face is None else None,
    )


def _rearranged(
    requested: C, processes: int, validate: Validate[C], planner: Planner, entries: int | None
) -> tuple[int, C, str]:
    """Choose a mesh for these processes, with the same global batch.

    Returns full_world_size, the configuration, and a line to print if the mesh has changed.
    """
    full = requested.mesh.full_world_size or recorded_world_size(requested)
    checkpoint = requested.checkpoint
    has_config = (Path(checkpoint.load or "") / CONFIG).is_file()
    if full is None and not checkpoint.finetune and has_config:
        raise ConfigError(
            f"allow_resize is set, but the config.toml in {checkpoint.load} does not record the "
            "number of processes that its sizes and batch are for; give --full-world-size N"
        )

    full = full or processes
    if full == processes:
        return full, requested.updated(full_world_size=full), ""

    validate(requested, full)
    batch = requested.train.batch_size(requested.mesh.data_parallel_size(full))
    config, reason = planner.mesh(
        requested.updated(full_world_size=full, global_batch_size=batch), processes, entries
    )

    pp, cp, tp = config.mesh.sizes
    dp = config.mesh.data_parallel_size(processes)
    micro = config.train.micro_batch_size
    line = (
        f"resized from {full} to {counted(processes, 'process')}: pipeline {pp} x data {dp} x "
        f"context {cp} x tensor {tp}, {counted(config.train.micro_batches(dp), 'micro-batch')} "
        f"of {micro} for global_batch_size {batch}; {reason}"
    )
    return full, config, line


def recorded_world_size(config: CommonConfig) -> int | None:
    """Return the full_world_size in the config.toml of the resumed run; None if there is none."""
    folder = config.checkpoint.load
    file = Path(folder or "") / CONFIG
    if folder is None or config.checkpoint.finetune or not file.is_file():
        return None
    return read_toml(type(config), file).get("full_world_size")


def _is_valid(config: C, processes: int, validate: Validate[C]) -> bool:
    try:
        validate(config, processes)
    except UserError:
        return False
    return True
