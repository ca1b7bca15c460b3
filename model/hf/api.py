"""Convert between Hugging Face models and ours: state dicts and safetensors folders, tensor by tensor if asked.

configs.py has the families and their configurations.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hf.adapter import CONFIG as ADAPTER
from model.hf.configs import config_from_hf, config_to_hf, families, family_of
from model.hf.folder import CONFIG, Joined, Read, check_described, check_sizes, described, finite, read_json
from model.hf.shards import Weights, inside, new_folder, write_model
from model.registry import meta_state
from runtime.errors import UserError, with_article


def from_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return our state dict. Raises UserError for missing, unknown, misshapen, wrongly tied or non-finite weights."""
    ours, read = our_weights(state, config)
    return {name: read(name) for name in ours}


def our_weights(
    state: Mapping[str, Tensor], config: ModelConfig, tell: Callable[[str], Any] = warnings.warn
) -> tuple[dict[str, Tensor], Read]:
    """Return meta tensors of our parameters, and what reads one of theirs as ours; the state may be ``Weights``.

    ``tell`` takes a line of what is passed over. Raises UserError as ``from_hf``: for non-finite values when they are
    read, for the rest now.
    """
    family = families(config)[0]
    state = Joined(state, family.apart) if family.apart else state
    found = described(state)
    sizes = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocabulary,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads x kv_channels": config.num_attention_heads * config.head_dim,
        "max_position_embeddings": config.position_table or 1,
    }
    check_sizes(found, config.num_layers, sizes)
    ours = meta_state(config)
    names = {name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name: name for name in found}
    names = {whole: name for whole, name in names.items() if not re.fullmatch(family.derived, whole)}
    if passed := sorted(name for name in names if re.fullmatch(family.skipped, name)):
        parts = ", ".join(dict.fromkeys(re.sub(r"^(model\.)?(\w+)\..*", r"\1\2", name) for name in passed))
        kind = with_article(config.model_type)
        tell(f"note: {len(passed)} weights of {parts} are passed over: they are no part of {kind} here")
        names = {name: names[name] for name in names.keys() - set(passed)}
    if sinks := sorted(name for name in names if name.endswith(".sinks")):
        raise UserError(
            f"{sinks[0]} holds attention sinks, and a model of model_type {config.model_type} has none there, so that "
            "other tokens would get their share; take a checkpoint without sinks: gpt-oss is not read"
        )
    inside = {table: table.inside(ours, config) for table in (family.names, *family.stored)}
    table = max(inside, key=lambda one: len(inside[one].keys() & names))
    whole_embedding = table.of("embedding.weight")
    if not config.untie_embeddings_and_output_weights and "lm_head.weight" in names:
        output, embedding = state[names.pop("lm_head.weight")], names.get(whole_embedding)
        if embedding is not None and not torch.equal(output, state[embedding]):
            raise UserError(f"lm_head.weight differs from {whole_embedding}, yet tie_word_embeddings is true")
    metas = {whole: found[name] for whole, name in names.items()}
    check_described(metas, table.to_theirs(ours, config))
    whole = finite(lambda name: state[names[name]])
    ours = {name: table.ours(metas.__getitem__, name, config) for name in ours}
    return ours, lambda name: table.ours(whole, name, config)


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict of their module for ours, a tied lm_head.weight included.

    Raises UserError for missing, unknown or misshapen weights, and for a model that transformers cannot express.
    """
    described_theirs, read = their_weights(described(state), state.__getitem__, config)
    theirs = {name: read(name) for name in described_theirs}
    if not config.untie_embeddings_and_output_weights:
        theirs["lm_head.weight"] = theirs[family_of(config).embedding]
    return theirs


def their_weights(ours: Mapping[str, Tensor], read: Read, config: ModelConfig) -> tuple[dict[str, Tensor], Read]:
    """Return meta tensors of their parameters, without tied copies, and what reads one of ours as theirs.

    Args:
        ours: meta tensors of all of our parameters.
        read: reads one of them.

    Raises:
        UserError: as ``to_hf``; for non-finite values when they are read.
    """
    names = family_of(config).names
    check_described(ours, meta_state(config))
    inside, whole = names.inside(ours, config), finite(read)
    return names.to_theirs(ours, config), lambda name: names.theirs(whole, inside[name], config)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json. Raises UserError for a file, or a folder of adapters."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a model")
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder / ADAPTER}: the folder holds adapters, which transformers loads on the model that they name; "
            "import that model with tools.convert_hf import MODEL RUN --adapter FOLDER, or take the file out"
        )
    return read_json(inside(folder, CONFIG))


def open_hf(folder: Path, tell: Callable[[str], Any] = warnings.warn) -> tuple[ModelConfig, dict[str, Tensor], Read]:
    """Return a folder's configuration, meta tensors of our parameters, and what reads one. UserError as load_hf."""
    config = config_from_hf(read_config(folder), folder)
    return config, *our_weights(Weights(folder, tell), config, tell)


def load_hf(folder: str | Path) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Any]]:
    """Load a Hugging Face folder, sharded or not: configuration, our state dict (CPU, dtypes as stored), config.json.

    Pass the contents of config.json to `save_hf` to keep entries that our configuration has no field for.

    Reads only safetensors, never pickles, and only files directly in the folder, whatever an index names. Raises
    UserError naming the file and what is wrong with it.
    """
    contents = read_config(Path(folder))
    config = config_from_hf(contents, Path(folder))
    return config, from_hf(Weights(Path(folder)), config), contents


def save_hf(
    folder: str | Path, config: ModelConfig, state: Mapping[str, Tensor], contents: Mapping[str, Any] | None = None
) -> None:
    """Write our state dict as config.json and model.safetensors, for transformers' from_pretrained.

    contents as for `config_to_hf`. Creates the folder. Raises UserError, and writes nothing, if the folder holds
    anything or is not writable, and as `config_to_hf` and `to_hf` do.
    """
    said = config_to_hf(config, contents)
    theirs, read = their_weights(described(state), state.__getitem__, config)  # transformers ties lm_head.weight again
    dtype = str(theirs[family_of(config).embedding].dtype).removeprefix("torch.")
    with new_folder(Path(folder)) as draft:
        write_model(draft, theirs, said | {"torch_dtype": dtype}, read)
