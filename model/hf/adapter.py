"""Adapters of a model (``model.parts.lora``) from and to PEFT's adapter_config.json and
adapter_model.safetensors.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from model.config import DecoderConfig
from model.hf.common import NAMES
from model.hf.folder import (
    Read,
    Weights,
    check_described,
    check_value,
    described,
    entry,
    finite,
    inside,
    naming,
    read_json,
    shown,
    write_json,
    write_weights,
)
from model.parts.lora import THEIRS, is_adapter
from model.registry import meta_state
from runtime.bounds import bounded
from runtime.errors import UserError, with_article

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model.model."
"""Beginning of PEFT's names."""
_NOTHING: tuple[Any, ...] = (None, False, [], {})
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Others change the base's weights when they begin, or its layers.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Keys of adapter_config.json with the values that a sum W + (alpha / r) B A has; of others,
nothing is supported.
"""
_WORDS = """
r lora_alpha lora_dropout target_modules
auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core qalora_group_size eva_config
"""
NEUTRAL = frozenset(_WORDS.split())
"""Keys that are read, or change nothing."""
MERGE = "merge it into its model with PEFT's merge_and_unload, and import that"


def write_adapter(
    folder: Path,
    ours: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    config: DecoderConfig,
    base: str | None,
) -> int:
    """Write into an empty folder what ``peft.PeftModel.from_pretrained`` loads, and return how many
    adapters these are.

    Args:
        ours: (meta) tensors of the model by our names.
        read: reads one of them.
        base: the name of the model that they belong to, as transformers finds it.

    Raises:
        UserError: the model has no adapters, or no linear layers that transformers has alike; for
            values that are not finite, when they are read.
    """
    if config.lora_rank is None:
        raise UserError(
            "adapter is asked for, and lora_rank is not set: the run has none; leave --adapter out"
        )
    if set(config.linears) != {*THEIRS.values()}:
        raise UserError(
            f"adapter is asked for, and model_type is {config.model_type}, whose linear layers are others in "
            "transformers; leave --adapter out, and the weights are written with the adapters in them"
        )
    stored = {peft_name(name): name for name in ours if is_adapter(name)}
    contents = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha or config.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": [
            theirs for theirs, name in THEIRS.items() if name in config.adapted_linears()
        ],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, contents)
    metas, whole = {theirs: ours[name] for theirs, name in stored.items()}, finite(read)
    write_weights(folder / WEIGHTS, metas, lambda theirs: whole(stored[theirs]))
    return len(stored) // 2


def peft_name(name: str) -> str:
    """Return PEFT's name of a parameter of ours: that of the linear layer, and then as ours."""
    linear, matrix, kind = name.rsplit(".", 2)
    return f"{BASE}{NAMES.of(f'{linear}.{kind}').removesuffix(kind)}{matrix}.{kind}"


def read_adapter(
    folder: Path, config: DecoderConfig, tell: Callable[[str], Any]
) -> tuple[DecoderConfig, dict[str, Tensor], Read]:
    """Return a model's configuration with PEFT's adapters, meta tensors of these by our names, and
    what reads one.

    Args:
        config: of the model that they belong to.
        tell: takes a line of what is passed over.

    Raises:
        UserError: naming the file and what our adapters cannot be (DoRA, rank-stabilised, of other
            modules, ...); for values that are not finite, when they are read.
    """
    path = inside(folder, CONFIG)
    contents = read_json(path)
    if set(config.linears) != {*THEIRS.values()}:
        kind = with_article(config.model_type)
        raise UserError(f"{path}: adapters of {kind}, whose linear layers are others here; {MERGE}")
    for key, value in contents.items():
        if key not in NEUTRAL:
            check_value(path, shown(key)[1:-1], value, ONLY.get(key, _NOTHING), f"; {MERGE}")
    theirs = Weights(folder, tell, WEIGHTS)
    with naming(path, "these are no adapters of PEFT"):
        dropout = entry(contents, "lora_dropout", float, 0.0)
        config = replace(
            config,
            lora_rank=entry(contents, "r", int),
            lora_alpha=entry(contents, "lora_alpha", float),
            lora_target=_targets(contents["target_modules"], theirs),
        )
    ours = meta_state(config)
    names = {name: peft_name(name) for name in ours if is_adapter(name)}
    found = described(theirs)
    with naming(path):
        check_described(found, {theirs: ours[name] for name, theirs in names.items()})
    if dropout:
        tell(
            f"note: {path}: lora_dropout = {dropout} is passed over; adapters have no dropout here"
        )
    whole = finite(theirs.__getitem__)
    return (
        config,
        {name: found[theirs] for name, theirs in names.items()},
        lambda name: whole(names[name]),
    )


def _targets(said: Any, theirs: Iterable[str]) -> tuple[str, ...]:
    """Return our names of the linear layers with an adapter; those of a pattern are those that the
    file has.
    """
    found = said
    if isinstance(said, str):
        found = sorted({name.removeprefix(BASE).rpartition(".lora_")[0] for name in theirs} - {""})
        if said != "all-linear" and (other := _unmatched(said, found)):
            raise UserError(
                f"target_modules is {shown(said)}, which does not match {other}, whose adapter the file has; give "
                "the pattern, or the names, that it was trained with"
            )
    if not isinstance(found, list) or not found:
        raise UserError(
            f"target_modules is {shown(said)}; it must be a list of names, or a pattern"
        )
    leaves = [
        name.rsplit(".", 1)[-1] if isinstance(name, str) else name for name in found
    ]  # names may be whole paths
    if strange := [
        name for name, leaf in zip(found, leaves, strict=True) if leaf not in list(THEIRS)
    ]:
        raise UserError(
            f"target_modules has {shown(strange[0])}, only {', '.join(THEIRS)} can have adapters; {MERGE}"
        )
    return tuple(ours for name, ours in THEIRS.items() if name in leaves)


def _unmatched(pattern: str, names: Sequence[str]) -> str | None:
    """Return the first name that a pattern of someone else does not match; any, if it is no
    pattern.
    """
    try:
        return bounded(
            f"target_modules is {shown(pattern)}, whose match",
            lambda: next((name for name in names if not re.fullmatch(pattern, name)), None),
        )
    except (re.error, OverflowError, RecursionError):
        return names[0]
