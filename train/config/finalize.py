"""Finalize a run's configuration: validate it, and decide once all that it leaves open.

Nothing replaces a field of it afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist

from model.registry import architecture_of
from parallel.context.config import ContextConfig
from runtime.errors import UserError
from runtime.processes import launched_world_size
from runtime.progress import counted
from runtime.together import from_first, is_first, raise_together
from train.config.common import CommonConfig
from train.config.derive import (
    CONFIG,
    beyond_rope,
    beyond_vocabulary,
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
"""A configuration and its processes -> the method, with a line that says why."""
Validate = Callable[[C, int], None]


class Planner(NamedTuple):
    """The planner's choices; this folder does not import them."""

    method: Method
    """Chooses the method ``auto``."""
    settings: Sequence[Callable[..., Any]]
    """Choose, in turn, what is left open once the method is known."""
    mesh: Callable[[Any, int, int | None], tuple[Any, str]]
    """A configuration, the processes at hand, its tokenizer's entries -> one for them, and why."""


@dataclass(frozen=True, kw_only=True)
class Final(Generic[C]):
    """A run's configuration, and what else is decided before anything is built."""

    config: C
    """The one in use: complete, valid, and with the schedule that the run takes."""
    saved: C
    """The one to write: as requested where another start decides anew, and without what holds for
    this start alone."""
    start: Start
    """The checkpoint or the weights to start from, or neither."""
    tokenizer: Any
    """None if the data are no text."""


def validate_launch(config: C, validate: Validate[C]) -> None:
    """Validate a run for the launched processes, before they join.

    With allow_resize it is for others, and ``finalize`` validates it.

    Raises UserError: as ``validate``.
    """
    processes = launched_world_size()
    if config.mesh.allow_resize:
        return
    try:
        validate(config, processes)
    except UserError as error:
        full = recorded_world_size(config) or processes
        if full == processes or not _is_valid(config, full, validate):
            raise  # the number of processes is not what is wrong
        raise ConfigError(
            f"{error}; or give --allow-resize: the run is for {counted(full, 'process')}, and the planner "
            "arranges these"
        ) from None


def finalize(requested: C, task: type[Task[C]], planner: Planner) -> Final[C]:
    """Decide everything that a parsed configuration leaves open, and print it; collective.

    The processes have joined.

    Raises:
        UserError: as the task's ``validate``; the tokenizer is missing; no mesh keeps the global
            batch, or fits in memory; a choice cannot be made; or the checkpoint does not suit the
            run.
    """
    with raise_together():
        tokenizer = task.load_tokenizer(requested)
    entries = None if tokenizer is None else tokenizer.vocab_size

    processes = launched_world_size()
    full, config = processes, requested
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
    """Return a complete configuration, and print what was chosen; collective.

    ``entries`` are those of the tokenizer. A sequence longer than rope reaches is noted, and so is
    a tokenizer of more entries than the model. With balance_over dp_cp, data-parallel ranks are
    context-parallel ones in it, as they are in the mesh.

    Raises UserError: the vocabulary has fewer entries, or a choice cannot be made.
    """
    notes: list[str | None] = []
    with raise_together():
        config = with_joined_ranks(config, dist.get_world_size())
        if entries is not None:
            config = with_vocabulary(config, entries)
            notes.append(beyond_vocabulary(config.model.vocab_size, entries))
    config = with_rope_length(config)
    for note in filter(None, [*notes, beyond_rope(config)]):
        if is_first():
            print(note, flush=True)
    config = with_method(config, dist.get_world_size(), planner.method)

    def with_settings() -> C:
        chosen = config
        for choose in planner.settings:
            chosen = choose(chosen)
        return chosen

    return from_first(with_settings)  # all ranks the same, whatever their GPUs and files are


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
    """Return the method of the run that is resumed on the same mesh, or the chosen one, and why."""
    earlier = Path(config.checkpoint.load or "") / CONFIG
    if config.checkpoint.load is not None and not config.checkpoint.finetune and earlier.exists():
        before = load(type(config), earlier)
        alike = (before.mesh.joined(world_size), before.sequence_length) == (
            config.mesh,
            config.sequence_length,
        )
        if alike and before.context.context_parallel_method != "auto":
            if config.hybrid_layouts:
                resumed: Any = replace(config, context=before.context)
                validate_hybrid(resumed)
            return (
                before.context,
                f"context parallelism: {before.context.title}, as {earlier} has it",
            )
    return choose(config, world_size)


def config_to_save(config: C, requested: C, world_size: int) -> C:
    """Return the configuration to write: another start may have other processes, and lengths.

    Checkpoints keep the resumed schedule. The flags that choose it and finetune are left out, as
    they hold for this start alone, and so is a load that only finetune takes.
    """
    sections: Any = {
        name: getattr(requested, name) for name in ("mesh", "train", "data_parallel", "recompute")
    }
    if requested.mesh.joined(world_size) != config.mesh:
        sections["context"] = requested.context
    checkpoint = config.checkpoint
    return replace(config, **sections).updated(
        **{
            name: value_of(requested, name)
            for name in config.DECIDED
            if name in config_fields(config)
        },
        override_opt_param_scheduler=False,
        use_checkpoint_opt_param_scheduler=False,
        finetune=False,
        allow_changed=(),
        load=checkpoint.load if checkpoint.hugging_face is None else None,
    )


def _rearranged(
    requested: C, processes: int, validate: Validate[C], planner: Planner, entries: int | None
) -> tuple[int, C, str]:
    """Choose for these processes: return full_world_size, the configuration, and a line if its mesh
    is another.
    """
    full = requested.mesh.full_world_size or recorded_world_size(requested)
    checkpoint = requested.checkpoint
    if (
        full is None
        and not checkpoint.finetune
        and (Path(checkpoint.load or "") / CONFIG).is_file()
    ):
        raise ConfigError(
            f"allow_resize is set, and the config.toml in {checkpoint.load} does not say for how many processes "
            "its sizes and batch are; give --full-world-size N"
        )
    full = full or processes
    if full == processes:
        return full, requested.updated(full_world_size=full), ""
    validate(requested, full)
    batch = requested.train.batch_size(requested.mesh.data_parallel_size(full))
    config, why = planner.mesh(
        requested.updated(full_world_size=full, global_batch_size=batch), processes, entries
    )
    pp, cp, tp = config.mesh.sizes
    dp, micro = config.mesh.data_parallel_size(processes), config.train.micro_batch_size
    line = (
        f"resized from {full} to {counted(processes, 'process')}: pipeline {pp} x data {dp} x context {cp} "
        f"x tensor {tp}, {counted(config.train.micro_batches(dp), 'micro-batch')} of {micro} "
        f"for global_batch_size {batch}; {why}"
    )
    return full, config, line


def recorded_world_size(config: CommonConfig) -> int | None:
    """Return the full_world_size in the config.toml of the run that ``--load`` resumes; None if
    there is none.
    """
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
