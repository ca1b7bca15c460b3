"""Architecture settings that finetuning may change: rope, windows and adapters."""

from pathlib import Path
from typing import Any

from train.checkpoint.manifest import CheckpointError

ADAPTED = "lora_"
"""Prefix of adapter settings."""
REFITTED = ("rotary_base", "rope_scaling_", "window_", ADAPTED)
"""Prefixes of settings that finetuning may change, because no base weight depends on them."""


def refit(
    path: Path, saved: dict[str, Any], current: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the run's architecture with the checkpoint's rope, windows and adapters.

    A comparison with the checkpoint's architecture then finds only the other differences. Also
    returns a note for each rope or window setting that changes.
    """
    check_adapters(path, saved, current, may_begin=True)
    refitted = [name for name in saved | current if name.startswith(REFITTED)]
    notes = []
    for name in refitted:
        if saved.get(name) != current.get(name) and not name.startswith(ADAPTED):
            notes.append(f"note: {name} was {saved.get(name)} and is {current.get(name)}")

    architecture = {name: value for name, value in current.items() if name not in refitted}
    for name in refitted:
        if name in saved:
            architecture[name] = saved[name]
    return architecture, notes


def check_adapters(
    path: Path, saved: dict[str, Any], current: dict[str, Any], *, may_begin: bool
) -> None:
    """Raise CheckpointError if a checkpoint's adapters differ from the run's.

    With ``may_begin`` a run may add adapters to a checkpoint without any.
    """
    before = _adapters(saved)
    after = _adapters(current)
    if after and not before and not may_begin:
        raise CheckpointError(
            f"lora_rank is {after['lora_rank']}, but {path} has no adapters; "
            "add --finetune to start adapters from its weights"
        )
    if before and before != after:
        raise CheckpointError(
            f"{path} has adapters with {_listed(before)}, but this run has {_listed(after)}; "
            "give the same settings, or merge the adapters: export the checkpoint with "
            "tools.convert_hf and import the result"
        )


def _adapters(architecture: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in architecture.items() if name.startswith(ADAPTED)}


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "none"
