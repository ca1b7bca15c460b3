"""Settings and files that a checkpoint records, and how they changed when a run resumes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train.checkpoint.manifest import CheckpointError
from train.config.common import CommonConfig
from train.config.flags import spelled
from train.schedule import schedule_of

MICRO = "micro_batch_size"
AVERAGED = "ema_decay"
"""Key of the EMA's decay in a checkpoint that contains an EMA of the weights."""


def checkpoint_extra(config: CommonConfig, contents: dict[str, str]) -> dict[str, Any]:
    """Return the run's configuration and files as JSON values, to record in its checkpoints.

    ``find_start`` reads them when a run resumes. ``contents`` is the value of ``config.contents()``
    when the run began.
    """
    return {
        "sample_order": config.named(config.SAMPLE_ORDER),
        "trained_for": config.named(config.OBJECTIVE),
        "settings": settings(config),
        "schedule": asdict(schedule_of(config.optimizer, config.train.train_iters)),
        "contents": contents,
    }


def settings(config: CommonConfig) -> dict[str, object]:
    """Return the settings that affect training, keyed by name.

    Objective, sample order and schedule are left out, because they are recorded separately.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    compared = config.optimizer.spec.compared_settings
    return {
        **config.named((*compared, "bf16", "fp8_format", "fp8_recipe", MICRO)),
        "global_batch_size": config.train.batch_size(config.mesh.data_parallel_size(world_size)),
        **config.named(config.NOTED),
    }


def changes(
    config: CommonConfig, extra: dict[str, Any], contents: dict[str, str]
) -> dict[str, str]:
    """Describe each changed setting and file, keyed by name, and how to keep the old value."""
    lines = {}
    for name, before, after in _changed(extra.get("settings", {}), settings(config)):
        if name == MICRO and config.mesh.allow_resize:
            continue
        keeps = f"; {spelled(name, before)} keeps it"
        if name == MICRO and config.mesh.balance_over == "dp_cp":
            keeps = ", counted over all data-parallel processes"
        lines[name] = f"{name} was {before} and is {after}{keeps}"

    sample_order = config.named(config.SAMPLE_ORDER)
    for name, before, after in _changed(extra.get("sample_order", {}), sample_order):
        lines[name] = (
            f"{name} was {before} and is {after}: the samples to come may repeat consumed ones; "
            f"{spelled(name, before)} keeps it"
        )

    for name, before, after in _changed(extra.get("contents", {}), contents):
        lines[name] = (
            f"{name} has changed since the run began "
            f"(digest {before!s:.8}, now {after:.8}); put the old file back to keep it"
        )
    return lines


def _changed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, saved value, current value) of the settings that differ.

    A setting that was not saved counts as equal.
    """
    differences = []
    for name, after in current.items():
        before = saved.get(name, after)
        if before != after:
            differences.append((name, before, after))
    return differences


def check_allowed(path: Path, changed_lines: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Raise CheckpointError for changes that ``allowed`` does not name.

    The micro-batch size may always change, because only the order of sums depends on it.
    """
    free = {*allowed, MICRO}
    if "all" in free:
        return
    refused = []
    settings_to_allow = []
    for name in changed_lines:
        setting = name.split()[0]  # keys of files are "setting path", such as "data_path my_prefix"
        if setting not in free:
            refused.append(name)
            settings_to_allow.append(setting)
    if refused:
        raise CheckpointError(
            f"{path} was trained with other settings or files: "
            f"{'. '.join(changed_lines[name] for name in refused)}. Keep the old values, or give "
            "--allow-changed "
            f"{' '.join(dict.fromkeys(settings_to_allow))}"
        )
