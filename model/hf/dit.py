"""Convert checkpoints of the original DiT (github.com/facebookresearch/DiT) from and to Longmesh.

The original fuses queries, keys and values in one matrix, has a convolution as patch embedding, and
stores the fixed positions. It does not support video; for video, the convolution here gets a
dimension of frames.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.dit import meta_dit_state, position_embedding
from model.dit_config import DiTConfig
from model.hf.entries import CONFIG, entry, naming, read_json, unsupported
from model.hf.family import Fused, Names
from model.hf.folder import new_folder
from model.hf.tensors import Weights, check_described, check_sizes, finite, write_model
from runtime.errors import UserError

PATCHES = "x_embedder.weight"
POSITIONS = "pos_embed"
NAMES = Names(
    top={"x_embedder": "x_embedder.proj", "y_embedder": "y_embedder.embedding_table"},
    layers="blocks",
    layer={"attention.wo": "attn.proj", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
    fused={"attn.qkv": Fused(("attention.wq", "attention.wk", "attention.wv"))},
    ours_of=lambda config, name, weight: _to_linear(weight) if name == PATCHES else weight,
    theirs_of=lambda config, name, weight: (
        _to_convolution(weight, config) if name == PATCHES else weight
    ),
)


def dit_from_original(state: Mapping[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """Convert the original DiT's state dict to Longmesh's.

    Raises:
        UserError: missing, unknown, misshapen or non-finite weights, or positions that differ from
            the computed ones.
    """
    sizes = {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_classes": config.num_classes,
        "the width of a patch": config.patch_width,
    }
    check_sizes(state, config.num_layers, sizes)
    ours = meta_dit_state(config)
    state = dict(state)
    positions = state.pop(POSITIONS, None)
    check_state(state, NAMES.to_theirs(ours, config))
    if positions is not None:
        _check_positions(positions, config)
    return {name: NAMES.ours(state.__getitem__, name, config) for name in ours}


def dit_to_original(state: Mapping[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """Convert Longmesh's state dict to the original DiT's, including the fixed positions.

    Raises:
        UserError: there are missing, unknown, misshapen or non-finite weights.
    """
    check_state(state, meta_dit_state(config))
    positions = position_embedding(torch.arange(config.num_patches), config)[None]
    return NAMES.to_theirs(state, config) | {POSITIONS: positions.to(state[PATCHES].dtype)}


def check_state(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise UserError for missing, unknown, misshapen, non-float or non-finite weights."""
    check_described(state, like)
    read = finite(state.__getitem__)
    for name in like:
        read(name)


def load_dit(folder: str | Path) -> tuple[DiTConfig, dict[str, Tensor]]:
    """Load the configuration and Longmesh's state dict (CPU, dtypes as stored) from a folder.

    The folder is one that `save_dit` wrote, or has the original's weights as model.safetensors and
    a config.json with the fields of DiTConfig. Reads only safetensors, never pickles.

    Raises:
        UserError: the message names the file and the problem.
    """
    folder = Path(folder)
    contents = read_json(folder / CONFIG)
    kind = contents.pop("model_type", "dit")
    if kind != "dit":
        raise unsupported("model_type", kind, '; only "dit" is', folder / CONFIG)
    defaults = {field.name: field.default for field in dataclasses.fields(DiTConfig)}
    unknown = sorted(contents.keys() - defaults.keys())
    if unknown:
        raise UserError(
            f"{folder / CONFIG}: {unknown[0]} is not a field of a DiT's configuration; remove it"
        )
    json_types = {tuple: list, type(None): int}
    values: dict[str, Any] = {}
    with naming(folder / CONFIG):
        for name, default in defaults.items():
            kind = json_types.get(type(default), type(default))
            values[name] = entry(contents, name, kind, default)
        config = DiTConfig(**values)
    return config, dit_from_original(Weights(folder), config)


def save_dit(folder: str | Path, config: DiTConfig, state: Mapping[str, Tensor]) -> None:
    """Write a state dict as config.json and model.safetensors, with the original DiT's names.

    Creates the folder.

    Raises:
        UserError: the folder is not empty; or under the conditions of `dit_to_original`.
    """
    contents: dict[str, Any] = {"model_type": "dit"} | dataclasses.asdict(config)
    theirs = dit_to_original(state, config)
    with new_folder(Path(folder)) as draft:
        write_model(draft, theirs, contents)


def _to_convolution(weight: Tensor, config: DiTConfig) -> Tensor:
    """Map [C, frames * height * width * channels] to [C, channels, (frames,) height, width]."""
    weight = weight.unflatten(1, (*config.patch_shape, -1)).movedim(-1, 1)
    return (weight if config.video else weight.squeeze(2)).contiguous()


def _to_linear(weight: Tensor) -> Tensor:
    """Map [C, channels, (frames,) height, width] to [C, frames * height * width * channels]."""
    return weight.movedim(1, -1).flatten(1).contiguous()


def _check_positions(positions: Tensor, config: DiTConfig) -> None:
    """Raise UserError unless stored positions [1, T, C] equal the computed ones."""
    shape = (1, config.num_patches, config.hidden_size)
    if positions.shape == shape:
        computed = position_embedding(torch.arange(config.num_patches), config)[None]
        tolerance = max(1e-5, torch.finfo(positions.dtype).eps)
        if torch.allclose(positions.double(), computed, rtol=0, atol=tolerance):
            return
    raise UserError(
        f"{POSITIONS} {tuple(positions.shape)} differs from the sines and cosines {shape} of the "
        "configuration, and positions here are never learned or resized; check latent_shape and "
        "patch_size"
    )
