"""Entries and weights shared by transformers' hybrid models with a delta rule."""

from typing import Any

from torch import Tensor

from model.hf.entries import entry, unsupported
from model.hf.family import Contents, Fused
from model.hf.parts import LISTED, WHOLE
from model.parts.delta import DeltaConfig

LINEAR = "linear_attention"
KINDS = ("layer_types", "full_attention_interval")


def kinds_of(layers: int, every: int) -> list[str]:
    """Return transformers' name for each layer's kind; every N-th layer has softmax attention."""
    return [LINEAR if (layer + 1) % every else WHOLE for layer in range(layers)]


def kinds_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the period of softmax attention layers, from layer_types or else from an interval."""
    layers = min(settings["num_layers"], LISTED)
    every = entry(hf, "full_attention_interval", int, DeltaConfig.default_period)
    kinds = hf.get("layer_types")
    if kinds is None:
        return {"softmax_every": every}

    every = 0
    if isinstance(kinds, list) and WHOLE in kinds:
        every = kinds.index(WHOLE) + 1
    if every < 2 or kinds != kinds_of(layers, every):
        rest = (
            f"; only {WHOLE} for every N-th of the {settings['num_layers']} layers and {LINEAR} "
            "for the others is"
        )
        raise unsupported("layer_types", kinds, rest)
    return {"softmax_every": every}


def kinds_to_hf(config: DeltaConfig) -> dict[str, Any]:
    """Return the config.json entries that ``kinds_from_hf`` reads."""
    return {"layer_types": kinds_of(config.num_layers, config.softmax_period or 1)}


def taps_from_hf(config: DeltaConfig, name: str, weight: Tensor) -> Tensor:
    """Flatten a convolution's weight [channels, 1, taps]; return any other weight unchanged."""
    return weight.flatten() if ".conv_" in name else weight


def taps_to_hf(config: DeltaConfig, name: str, weight: Tensor) -> Tensor:
    """Undo ``taps_from_hf``; the weight may contain several convolutions."""
    if ".conv_" not in name:
        return weight
    return weight.view(-1, 1, config.linear_conv_kernel_dim)


def sizes(config: DeltaConfig) -> tuple[int, int, int]:
    """Return the number of channels of a delta rule's queries, keys and values."""
    keys = config.key_heads * config.key_dim
    return keys, keys, config.value_heads * config.value_dim


CONVOLUTION = Fused(("attention.conv_q", "attention.conv_k", "attention.conv_v"), sizes=sizes)
