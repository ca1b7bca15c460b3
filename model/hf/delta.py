"""Entries and weights that Hugging Face's hybrids of a delta rule share."""

from typing import Any

from torch import Tensor

from model.hf.family import Contents, Fused
from model.hf.folder import entry, unsupported
from model.hf.parts import LISTED, WHOLE
from model.parts.delta import DeltaConfig

LINEAR = "linear_attention"
KINDS = ("layer_types", "full_attention_interval")


def kinds_of(layers: int, every: int) -> list[str]:
    """Return transformers' names of the layers' kinds."""
    return [LINEAR if (layer + 1) % every else WHOLE for layer in range(layers)]


def kinds_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return our period of softmax attention; layer_types names each layer's kind, or an interval
    says it."""
    layers = min(settings["num_layers"], LISTED)
    every = entry(hf, "full_attention_interval", int, DeltaConfig.default_period)
    if (kinds := hf.get("layer_types")) is None:
        return {"softmax_every": every}
    every = kinds.index(WHOLE) + 1 if isinstance(kinds, list) and WHOLE in kinds else 0
    if every < 2 or kinds != kinds_of(layers, every):
        only = f"{WHOLE} in every so many-th of the {settings['num_layers']} layers, and {LINEAR} in the others, is"
        raise unsupported("layer_types", kinds, f"; only {only}")
    return {"softmax_every": every}


def kinds_to_hf(config: DeltaConfig) -> dict[str, Any]:
    """Return the entries that ``kinds_from_hf`` reads."""
    return {"layer_types": kinds_of(config.num_layers, config.softmax_period or 1)}


def taps_from_hf(config: DeltaConfig, name: str, weight: Tensor) -> Tensor:
    """Return our vector of a convolution's weight, theirs [channels, 1, taps]; another weight as it
    is."""
    return weight.flatten() if ".conv_" in name else weight


def taps_to_hf(config: DeltaConfig, name: str, weight: Tensor) -> Tensor:
    """Return theirs of ours, which may be joined."""
    return weight.view(-1, 1, config.linear_conv_kernel_dim) if ".conv_" in name else weight


def sizes(config: DeltaConfig) -> tuple[int, int, int]:
    """Return the channels of a delta rule's queries, keys and values."""
    keys = config.key_heads * config.key_dim
    return keys, keys, config.value_heads * config.value_dim


CONVOLUTION = Fused(("attention.conv_q", "attention.conv_k", "attention.conv_v"), sizes=sizes)
