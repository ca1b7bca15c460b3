"""Convert models between Hugging Face's format and Longmesh's: state dicts and safetensors folders.

`our_weights` and `their_weights` are lazy: they return meta tensors and a function that converts
one tensor per call, so that a large model is never in memory twice.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import DecoderConfig
from model.hf.configs import config_from_hf, config_to_hf, families, family_of, read_config
from model.hf.family import Family
from model.hf.folder import new_folder
from model.hf.tensors import (
    Read,
    Weights,
    check_described,
    check_sizes,
    described,
    finite,
    write_model,
)
from model.registry import meta_state
from runtime.errors import UserError, with_article

OUTPUT = "lm_head.weight"


class Joined(Mapping[str, Tensor]):
    """A state dict that concatenates, on reading, modules that a file stores in pieces."""

    def __init__(self, state: Mapping[str, Tensor], split: Mapping[str, Sequence[str]]) -> None:
        """Find the pieces of each concatenated module.

        Args:
            split: names of the pieces in order, keyed by the name of the concatenated module.
        """
        self._state = state
        self._pieces = {name: [name] for name in state}
        for joined, pieces in split.items():
            for name in state:
                if pieces[0] in name:
                    self._join(
                        name.replace(pieces[0], joined),
                        [name.replace(pieces[0], piece) for piece in pieces],
                    )

    def _join(self, joined: str, names: list[str]) -> None:
        if all(name in self._pieces for name in names):
            for name in names:
                del self._pieces[name]
            self._pieces[joined] = names

    def __getitem__(self, name: str) -> Tensor:
        pieces = [self._state[piece] for piece in self._pieces[name]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def from_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Convert a transformers state dict to Longmesh's.

    Raises:
        UserError: missing, unknown, misshapen, wrongly tied or non-finite weights.
    """
    ours, read = our_weights(state, config)
    return {name: read(name) for name in ours}


def our_weights(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    notify: Callable[[str], Any] = warnings.warn,
) -> tuple[dict[str, Tensor], Read]:
    """Return meta tensors of Longmesh's parameters, and a function that converts and returns one.

    Args:
        state: transformers' state dict, or the ``Weights`` of a folder.
        notify: function that receives a line about ignored weights.

    Raises:
        UserError: under the conditions of ``from_hf``; for a non-finite value, only when it is
            read.
    """
    family = families(config)[0]
    if family.split:
        state = Joined(state, family.split)
    metas = described(state)
    _check_sizes(metas, config)
    names = _weight_names(family, state, config, notify)
    ours = meta_state(config)

    # A file may use names other than those of transformers' modules; take the table that has the
    # most of the file's names.
    tables = (family.names, *family.stored)
    table = max(tables, key=lambda candidate: len(candidate.inside(ours, config).keys() & names))
    if not config.untie_embeddings_and_output_weights and OUTPUT in names:
        _check_tied(state, names, table.of("embedding.weight"))
        del names[OUTPUT]

    theirs = {name: metas[stored] for name, stored in names.items()}
    check_described(theirs, table.to_theirs(ours, config))
    read_finite = finite(lambda name: state[names[name]])
    our_metas = {name: table.ours(theirs.__getitem__, name, config) for name in ours}
    return our_metas, lambda name: table.ours(read_finite, name, config)


def _check_sizes(metas: Mapping[str, Tensor], config: DecoderConfig) -> None:
    sizes = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocabulary,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads x kv_channels": config.num_attention_heads * config.head_dim,
        "max_position_embeddings": config.position_table or 1,
    }
    check_sizes(metas, config.num_layers, sizes)


def _weight_names(
    family: Family,
    state: Iterable[str],
    config: DecoderConfig,
    notify: Callable[[str], Any],
) -> dict[str, str]:
    """Return the names of weights in the file, keyed by name with prefix, without ignored weights.

    Raises:
        UserError: the state has attention sinks, which none of these models has.
    """
    names: dict[str, str] = {}
    skipped = []
    for stored in state:
        name = stored
        if not name.startswith((family.prefix, "lm_head.")):
            name = family.prefix + name
        if re.fullmatch(family.derived, name):
            continue
        if re.fullmatch(family.skipped, name):
            skipped.append(name)
        else:
            names[name] = stored

    if skipped:
        parts = [re.sub(r"^(model\.)?(\w+)\..*", r"\1\2", name) for name in sorted(skipped)]
        notify(
            f"note: {len(skipped)} weights of {', '.join(dict.fromkeys(parts))} are ignored: "
            f"they are not part of {with_article(config.model_type)} here"
        )
    sinks = sorted(name for name in names if name.endswith(".sinks"))
    if sinks:
        raise UserError(
            f"{sinks[0]} holds attention sinks, but model_type {config.model_type} has none in "
            "transformers, and without them other tokens would get their share of the attention; "
            "take a checkpoint without sinks (gpt-oss cannot be read)"
        )
    return names


def _check_tied(state: Mapping[str, Tensor], names: Mapping[str, str], embedding: str) -> None:
    """Raise UserError if a tied output projection is stored and differs from the embedding."""
    if embedding in names and not torch.equal(state[names[OUTPUT]], state[names[embedding]]):
        raise UserError(
            f"{OUTPUT} differs from {embedding}, but tie_word_embeddings is true; correct "
            "tie_word_embeddings in config.json"
        )


def to_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Convert Longmesh's state dict to transformers', including a tied lm_head.weight.

    Raises:
        UserError: missing, unknown, misshapen or non-finite weights, or a model that transformers
            cannot express.
    """
    metas, read = their_weights(described(state), state.__getitem__, config)
    theirs = {name: read(name) for name in metas}
    if not config.untie_embeddings_and_output_weights:
        theirs[OUTPUT] = theirs[family_of(config).embedding]
    return theirs


def their_weights(
    ours: Mapping[str, Tensor], read: Read, config: DecoderConfig
) -> tuple[dict[str, Tensor], Read]:
    """Return meta tensors of transformers' parameters, and a function that converts one.

    A weight that is tied to another is left out.

    Args:
        ours: meta tensors of all of Longmesh's parameters.
        read: function that returns one of these parameters.

    Raises:
        UserError: under the conditions of ``to_hf``; for a non-finite value, only when it is read.
    """
    names = family_of(config).names
    check_described(ours, meta_state(config))
    inside_theirs = names.inside(ours, config)
    read_finite = finite(read)

    def read_theirs(name: str) -> Tensor:
        return names.theirs(read_finite, inside_theirs[name], config)

    return names.to_theirs(ours, config), read_theirs


def open_hf(
    folder: Path, notify: Callable[[str], Any] = warnings.warn
) -> tuple[DecoderConfig, dict[str, Tensor], Read]:
    """Return a folder's configuration, meta tensors of parameters, and a function that reads one.

    Raises:
        UserError: under the conditions of `load_hf`.
    """
    config = config_from_hf(read_config(folder), folder)
    return config, *our_weights(Weights(folder, notify), config, notify)


def load_hf(folder: str | Path) -> tuple[DecoderConfig, dict[str, Tensor], dict[str, Any]]:
    """Load a model from a Hugging Face folder, sharded or not.

    Reads only safetensors, never pickles, and only files directly in the folder, even if an index
    names others.

    Returns:
        The configuration, Longmesh's state dict (CPU, dtypes as stored), and the contents of
        config.json, from which `save_hf` keeps entries that Longmesh's configuration lacks.

    Raises:
        UserError: the message names the file and the problem.
    """
    contents = read_config(Path(folder))
    config = config_from_hf(contents, Path(folder))
    return config, from_hf(Weights(Path(folder)), config), contents


def save_hf(
    folder: str | Path,
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    contents: Mapping[str, Any] | None = None,
) -> None:
    """Write a state dict as config.json and model.safetensors, for transformers' from_pretrained.

    Creates the folder. ``contents`` is as in `config_to_hf`.

    Raises:
        UserError: the folder is not empty or not writable, in which case nothing is written; or
            under the conditions of `config_to_hf` and `to_hf`.
    """
    entries = config_to_hf(config, contents)
    # A tied lm_head.weight is not written, since transformers ties it again.
    theirs, read = their_weights(described(state), state.__getitem__, config)
    dtype = str(theirs[family_of(config).embedding].dtype).removeprefix("torch.")
    with new_folder(Path(folder)) as draft:
        write_model(draft, theirs, entries | {"torch_dtype": dtype}, read)
