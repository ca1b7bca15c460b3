"""Adapters of a model (``model.parts.lora``) from and to PEFT's format.

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
"""Prefix of PEFT's names."""
_NOTHING: tuple[Any, ...] = (None, False, [], {})
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Other values change the base's weights at the start, or its layers.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Keys of adapter_config.json, and the values with which an adapter is W + (alpha / r) B A. Of a
key in neither table only a value that means nothing is supported."""
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
"""Keys that are read, or change nothing."""
MERGE = "merge it into its model with PEFT's merge_and_unload, and import that"


def write_adapter(
    folder: Path,
    ours: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    config: DecoderConfig,
    base: str | None,
) -> int:
    """Write adapters into an empty folder, for ``peft.PeftModel.from_pretrained``.

    Args:
        ours: the model's tensors by our names; meta tensors suffice.
        read: returns one of them.
        base: the name or path of the base model, for transformers.

    Returns:
        The number of adapters.

    Raises:
        UserError: the model has no adapters, or its linear layers differ in transformers; when
            values are read, those that are not finite.
    """
    if config.lora_rank is None:
        raise UserError(
            "adapter is asked for, and lora_rank is not set: the run has none; leave --adapter out"
        )
    if set(config.linears) != {*THEIRS.values()}:
        raise UserError(
            f"adapter is asked for, and model_type is {config.model_type}, whose linear layers are "
            "others in transformers; leave --adapter out, and the weights are written with the "
            "adapters in them"
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
    return len(names) // 2  # A and B each


def peft_name(name: str) -> str:
    """Return PEFT's name of an adapter's parameter: their linear layer, then our suffix."""
    linear, matrix, kind = name.rsplit(".", 2)
    theirs = NAMES.of(f"{linear}.{kind}").removesuffix(kind)
    return f"{BASE}{theirs}{matrix}.{kind}"


def read_adapter(
    folder: Path, config: DecoderConfig, notify: Callable[[str], Any]
) -> tuple[DecoderConfig, dict[str, Tensor], Read]:
    """Read PEFT's adapters for a model.

    Args:
        config: of the base model.
        notify: receives a line for each thing that is ignored.

    Returns:
        The configuration with adapters, meta tensors of the adapters by our names, and a function
        that reads one.

    Raises:
        UserError: naming the file and what our adapters cannot be (DoRA, rank-stabilised, of other
            modules, ...); when values are read, those that are not finite.
    """
    path = inside(folder, CONFIG)
    contents = read_json(path)
    if set(config.linears) != {*THEIRS.values()}:
        kind = with_article(config.model_type)
        raise UserError(f"{path}: adapters of {kind}, whose linear layers are others here; {MERGE}")
    for key, value in contents.items():
        if key not in NEUTRAL:
            check_value(path, shown(key)[1:-1], value, ONLY.get(key, _NOTHING), f"; {MERGE}")

    weights = Weights(folder, notify, WEIGHTS)
    with naming(path, "these are no adapters of PEFT"):
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
        notify(
            f"note: {path}: lora_dropout = {dropout} is passed over; adapters have no dropout here"
        )
    read_finite = finite(weights.__getitem__)
    ours = {name: theirs[their_name] for name, their_name in names.items()}
    return config, ours, lambda name: read_finite(names[name])


def _targets(target_modules: Any, weights: Iterable[str]) -> tuple[str, ...]:
    """Return our names of the linear layers with an adapter.

    Args:
        target_modules: names, or a pattern, whose matches are then the adapters in the file.
        weights: the names of the file's tensors.
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
                f"target_modules is {shown(target_modules)}, which does not match {unmatched}, "
                "whose adapter the file has; give the pattern, or the names, that it was trained "
                "with"
            )
    if not isinstance(modules, list) or not modules:
        raise UserError(
            f"target_modules is {shown(target_modules)}; it must be a list of names, or a pattern"
        )

    targets = []
    for module in modules:
        # A name may be a whole path.
        leaf = module.rsplit(".", 1)[-1] if isinstance(module, str) else module
        if leaf not in list(THEIRS):
            raise UserError(
                f"target_modules has {shown(module)}, only {', '.join(THEIRS)} can have adapters; "
                f"{MERGE}"
            )
        targets.append(leaf)
    return tuple(ours for theirs, ours in THEIRS.items() if theirs in targets)


def _first_unmatched(pattern: str, names: Sequence[str]) -> str | None:
    """Return the first name that an untrusted pattern does not match; any, if it is invalid.

    The time is bounded, since a pattern can be made to take exponential time.
    """

    def search() -> str | None:
        for name in names:
            if not re.fullmatch(pattern, name):
                return name
        return None

    try:
        return bounded(f"target_modules is {shown(pattern)}, whose match", search)
    except (re.error, OverflowError, RecursionError):
        return names[0]
