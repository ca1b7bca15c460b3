"""What going on from a checkpoint changes: the schedule that is taken, and a line for all that is not as it was."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from checkpoint.api import CheckpointError
from train.config.common import CommonConfig
from train.config.flags import spelled
from train.schedule import Schedule, schedule_of

Run = TypeVar("Run", bound=CommonConfig)
OPTIMIZER = ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")


def kept(config: CommonConfig, contents: dict[str, str]) -> dict[str, Any]:
    """What a checkpoint says of its run's configuration and files, for ``continued`` and ``changes``; JSON-able.

    Args:
        contents: what ``config.contents()`` was when the run began.
    """
    return {
        "sample_order": config.sample_order(),
        "trained_for": config.trained_for(),
        "settings": settings(config),
        "schedule": asdict(schedule_of(config.optimizer, config.train.train_iters)),
        "contents": contents,
    }


def settings(config: CommonConfig) -> dict[str, object]:
    """What changes training but neither its aim, the order of the samples nor the learning rate; by field."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return {
        **{name: getattr(config.optimizer, name) for name in OPTIMIZER},
        "bf16": config.train.bf16,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.batch_size(config.mesh.data_parallel_size(world_size)),
        **config.noted(),
    }


def continued(config: Run, path: Path, extra: dict[str, Any], iteration: int) -> tuple[Run, str | None]:
    """The configuration with the schedule that a run takes from ``iteration`` on, and the line that tells of a choice.

    That of the checkpoint where train_iters alone has changed, so that a longer run has no jump, unless it comes to a
    learning rate of 0 before the run ends; of the configuration where anything else of it has. The flags of
    OptimizerConfig choose.

    Raises:
        CheckpointError: the checkpoint's schedule makes no sense.
    """
    own, optimizer = schedule_of(config.optimizer, config.train.train_iters), config.optimizer
    before = _saved_schedule(config, path, extra)
    if before is None:
        wanted = optimizer.use_checkpoint_opt_param_scheduler
        return config, f"note: {path} keeps no schedule: this configuration's is taken" if wanted else None
    if before == own or iteration >= config.train.train_iters:
        return config, None
    longer = schedule_of(optimizer, before.lr_decay_iters or config.train.train_iters) == before
    there, here = before.rate(iteration + 1), own.rate(iteration + 1)
    keep = longer and before.rate(config.train.train_iters) > 0 and not optimizer.override_opt_param_scheduler
    keep |= optimizer.use_checkpoint_opt_param_scheduler
    other = asdict(own)
    differing = [f"{name} was {was} and is {other[name]}" for name, was in asdict(before).items() if was != other[name]]
    end = before.lr_decay_iters
    later = f" ({before.rate(end + 1):.6E} after iteration {end})" if end is not None else ""
    choice = (
        "it goes on with the checkpoint's; --override-opt-param-scheduler takes the other"
        if keep
        else "it goes on with this configuration's; --use-checkpoint-opt-param-scheduler keeps the checkpoint's"
    )
    note = (
        f"note: lr at iteration {iteration + 1} is {there:.6E} by the checkpoint's schedule{later} and {here:.6E} "
        f"by this configuration's ({', '.join(differing)}): {choice}"
    )
    return replace(config, optimizer=before.taken_by(optimizer)) if keep else config, note


def _saved_schedule(config: CommonConfig, path: Path, extra: dict[str, Any]) -> Schedule | None:
    """None in a checkpoint of a version that kept none."""
    if "schedule" not in extra:
        return None
    own = schedule_of(config.optimizer, config.train.train_iters)
    try:
        known = {field.name: extra["schedule"][field.name] for field in fields(Schedule)}
        before = replace(own, **known)
        before.taken_by(config.optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} keeps a schedule that makes no sense ({type(error).__name__}: {error}); load another one"
        ) from error
    return before


def changes(config: CommonConfig, extra: dict[str, Any], contents: dict[str, str]) -> list[str]:
    """A line for each setting and each file that is not as it was, with the flag that keeps the old one."""
    lines = []
    # Earlier versions kept an entry's own settings alone, as drawn_by.
    before = {**extra.get("drawn_by", {}), **extra.get("settings", {})}
    for name, now in settings(config).items():
        if (was := before.get(name, now)) != now:
            lines.append(f"note: {name} was {was} and is {now}; {spelled(name, was)} keeps it")
    for name, now in config.sample_order().items():
        if (was := extra.get("sample_order", {}).get(name, now)) != now:
            lines.append(
                f"note: {name} was {was} and is {now}: the samples to come may repeat consumed ones; "
                f"{spelled(name, was)} keeps it"
            )
    for name, now in contents.items():
        if (was := extra.get("contents", {}).get(name, now)) != now:
            lines.append(
                f"note: {name} holds something else than when the run began (digest {was!s:.8}, now {now:.8}); "
                "put the old file in its place to keep it"
            )
    return lines
