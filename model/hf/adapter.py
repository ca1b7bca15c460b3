"""Convert a model's adapters (``model.parts.lora``) from and to PEFT's format.

PEFT writes adapter_config.json and adapter_model.safetensors.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from model.config import DecoderConfig
from model.hf.common import NAMES
from model.hf.entries import check_value, entry, naming, read_json, shown, write_json
from model.hf.folder import inside
from model.hf.tensors import Read, Weights, check_described, described, finite, write_weights
from model.parts.lora import THEIRS, is_adapter
from model.registry import meta_state
from runtime.bounds import bounded
from runtime.errors import UserError, with_article

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base_model.model."
"""Prefix of parameter names in PEFT's files."""
_NOTHING: tuple[Any, ...] = (None, False, [], {})
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Other values change the base model's initial weights or its layers.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Keys of adapter_config.json, with the values for which a layer computes W + (alpha / r) B A. A
key that is neither here nor in NEUTRAL may only have a value that changes nothing."""
NEUTRAL = frozenset(
    {
        "r",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "megatron_core",
        "qalora_group_size",
        "eva_config",
    }
)
"""Keys of adapter_config.json that are read, or that change nothing."""
MERGE = "merge the adapters with PEFT's merge_and_unload, and import the merged model"


def write_adapter(
    folder: Path,
    ours: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    config: DecoderConfig,
    base: str | None,
) -> int:
    """Write adapters to an empty folder, for ``peft.PeftModel.from_pretrained``.

    Args:
        ours: the model's tensors, keyed by Longmesh's names; meta tensors suffice.
        read: function that returns one of the tensors by name.
        base: the name or path of the base model, for transformers.

    Returns:
        The number of adapters.

    Raises:
        UserError: the model has no adapters, transformers splits it into other linear layers, or a
            value that is read is not finite.
    """
    if config.lora_rank is None:
        raise UserError(
            "--adapter is set, but the run has no adapters, since its lora_rank is not set; leave "
            "out --adapter"
        )
    if set(config.linears) != {*THEIRS.values()}:
        raise UserError(
            f"--adapter is set, but the linear layers of model_type {config.model_type} are "
            "different in transformers; leave out --adapter to write weights with the adapters "
            "merged into them"
        )
    adapted = config.adapted_linears()
    contents = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha or config.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": [theirs for theirs, name in THEIRS.items() if name in adapted],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, contents)

    names = {peft_name(name): name for name in ours if is_adapter(name)}
    metas = {theirs: ours[name] for theirs, name in names.items()}
    read_finite = finite(read)
    write_weights(folder / WEIGHTS, metas, lambda theirs: read_finite(names[theirs]))
    return len(names) // 2  # matrices A and B of each adapter


def peft_name(name: str) -> str:
    """Return PEFT's name of an adapter's parameter: the linear layer's, with the same suffix."""
    linear, matrix, kind = name.rsplit(".", 2)
    theirs = NAMES.of(f"{linear}.{kind}").removesuffix(kind)
    return f"{BASE}{theirs}{matrix}.{kind}"


def read_adapter(
    folder: Path, config: DecoderConfig, notify: Callable[[str], Any]
) -> tuple[DecoderConfig, dict[str, Tensor], Read]:
    """Read PEFT's adapters for a model.

    Args:
        config: configuration of the base model.
        notify: function that receives a line for each setting that is ignored.

    Returns:
        The configuration with adapters, meta tensors of the adapters keyed by Longmesh's names,
        and a function that reads one of them.

    Raises:
        UserError: a setting is not supported (DoRA, rank-stabilised, other modules, ...), or a
            value that is read is not finite; the message names the file and the setting.
    """
    path = inside(folder, CONFIG)
    contents = read_json(path)
    if set(config.linears) != {*THEIRS.values()}:
        kind = with_article(config.model_type)
        raise UserError(f"{path}: PEFT's names do not fit the linear layers of {kind}; {MERGE}")
    for key, value in contents.items():
        if key not in NEUTRAL:
            check_value(path, shown(key)[1:-1], value, ONLY.get(key, _NOTHING), f"; {MERGE}")

    weights = Weights(folder, notify, WEIGHTS)
    with naming(path, "the file does not describe PEFT adapters"):
        dropout = entry(contents, "lora_dropout", float, 0.0)
        config = replace(
            config,
            lora_rank=entry(contents, "r", int),
            lora_alpha=entry(contents, "lora_alpha", float),
            lora_target=_targets(contents["target_modules"], weights),
        )

    expected = meta_state(config)
    names = {name: peft_name(name) for name in expected if is_adapter(name)}
    theirs = described(weights)
    with naming(path):
        check_described(theirs, {names[name]: expected[name] for name in names})
    if dropout:
        notify(f"note: {path}: lora_dropout = {dropout} is ignored; adapters have no dropout here")
    read_finite = finite(weights.__getitem__)
    ours = {name: theirs[their_name] for name, their_name in names.items()}
    return config, ours, lambda name: read_finite(names[name])


def _targets(target_modules: Any, weights: Iterable[str]) -> tuple[str, ...]:
    """Return Longmesh's names of the linear layers that have an adapter.

    Args:
        target_modules: names, or a pattern that must match the adapters in the file.
        weights: names of the tensors in the file.
    """
    modules = target_modules
    if isinstance(target_modules, str):
        names = {name.removeprefix(BASE).rpartition(".lora_")[0] for name in weights}
        modules = sorted(names - {""})
        unmatched = None
        if target_modules != "all-linear":
            unmatched = _first_unmatched(target_modules, modules)
        if unmatched:
            raise UserError(
                f"target_modules is {shown(target_modules)}, but the file has an adapter of "
                f"{unmatched}, which this pattern does not match; give the pattern or the names "
                "that the adapters were trained with"
            )
    if not isinstance(modules, list) or not modules:
        raise UserError(
            f"target_modules is {shown(target_modules)}; it must be a list of names, or a pattern"
        )

    targets = []
    for module in modules:
        # A target may be a module's whole path, of which only the last part is in the table.
        leaf = module.rsplit(".", 1)[-1] if isinstance(module, str) else module
        if leaf not in list(THEIRS):
            raise UserError(
                f"target_modules has {shown(module)}, but only "
                f"{', '.join(THEIRS)} can have adapters; {MERGE}"
            )
        targets.append(leaf)
    return tuple(ours for theirs, ours in THEIRS.items() if theirs in targets)


def _first_unmatched(pattern: str, names: Sequence[str]) -> str | None:
    """Return the first name that an untrusted pattern does not match; an invalid one has no match.

    The time is bounded, since a pattern can be made to take exponential time.
    """

    def search() -> str | None:
        for name in names:
            if not re.fullmatch(pattern, name):
                return name
        return None

    try:
        return bounded(f"matching target_modules {shown(pattern)}", search)
    except (re.error, OverflowError, RecursionError):
        return names[0]
