"""Convert between Hugging Face models and ours: configurations, state dicts and safetensors folders.

Each family has its file: llama.py (LlamaForCausalLM), gpt2.py (GPT2LMHeadModel) and transnormer.py (the released
TransNormerLLM checkpoints).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hf import gpt2, llama, transnormer
from model.hf.folder import (
    CONFIG,
    WEIGHTS,
    check_sizes,
    check_state,
    entry,
    read_json,
    read_weights,
    shown,
    write_folder,
)
from model.registry import shapes_of
from runtime.errors import UserError

INDEX = f"{WEIGHTS}.index.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NOT_KEPT = {"auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version", "_name_or_path"}
"""Entries that describe the files, not the model."""


class Family(Protocol):
    """Interface of a family's module."""

    SUPPORTED: dict[str, tuple[Any, ...]]
    """Keys of config.json that may ask for what our model does not compute, with the supported values; a missing key
    means the first."""
    UNSAID: dict[str, Any]
    """Defaults of an export for keys that our model does not determine."""
    REPLACED: set[str]
    """Aliases of keys that an export writes already."""
    EMBEDDING: str
    """Their name of the embedding's weight, which lm_head.weight may be tied to."""
    DERIVED: re.Pattern[str]
    """Names in old checkpoints that are not weights."""
    PREFIX: str
    """Prefix of all names but lm_head's, which some files omit."""

    def check(self, config: ModelConfig) -> None: ...

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig: ...

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]: ...

    def to_ours(self, theirs: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]: ...

    def to_theirs(self, ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]: ...


FAMILIES: dict[str, Family] = {"llama": llama, "gpt": gpt2, "transnormer": transnormer}


def _family(config: ModelConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model_type is {config.model_type}, which Hugging Face has no model of; only {_listed(FAMILIES)}"
        )
    for name, default in (("window_size", None), ("softmax_type", "vanilla")):
        if (value := getattr(config, name)) != default:
            raise UserError(
                f"{name} is {value}, and Hugging Face's {config.model_type} has neither windows nor sinks; only "
                f"{'none' if default is None else default} can be read and written, keep others in their checkpoints"
            )
    return FAMILIES[config.model_type]


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from a config.json's contents; ignore keys that do not change the computation.

    Without a model_type, assume a LLaMA. Raises UserError naming a key that is missing, of the wrong type, or not
    supported (rope_scaling, another activation, ...).
    """
    by_type = {family.SUPPORTED["model_type"][0]: family for family in FAMILIES.values()}
    kind = hf.get("model_type", "llama")
    if kind not in list(by_type):  # not in the dict: JSON lists are unhashable
        raise UserError(f"{CONFIG}: model_type = {shown(kind)} is not supported; only {_listed(by_type)} are")
    try:
        _check_read(hf, by_type[kind])
        found = by_type[kind].config_from_hf(hf)
    except KeyError as missing:
        raise UserError(f"{CONFIG}: {missing.args[0]} is missing; this is no {kind}'s configuration") from None
    except ValueError as error:
        reason = str(error).removeprefix(f"{CONFIG}: ")
        raise UserError(f"{CONFIG}: {reason}") from None
    return found


def _check_read(contents: Mapping[str, Any], family: Family) -> None:
    """Raise UserError for entries of an unsupported model, or that transformers cannot read."""
    for key, supported in family.SUPPORTED.items():
        if (value := contents.get(key, supported[0])) not in supported:
            only = " or ".join(map(shown, supported))
            raise UserError(f"{CONFIG}: {key} = {shown(value)} is not supported; only {only} is")
    for key in TOKEN_IDS:
        several = key == "eos_token_id" and isinstance(contents.get(key), list)
        entry(contents, key, list if several else int, None)
    longest = entry(contents, "max_position_embeddings", int, None)
    if longest is not None and longest < 1:
        raise UserError(f"{CONFIG}: max_position_embeddings is below 1; it must be the longest sequence")
    for key in family.UNSAID:
        rate = entry(contents, key, float, None) if key.endswith(("dropout", "pdrop")) else None
        if rate is not None and not 0 <= rate < 1:
            raise UserError(f"{CONFIG}: {key} is {shown(contents[key])}; it must be from 0 to below 1")


def config_to_hf(config: ModelConfig, contents: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the contents of a config.json that transformers reads as the same model.

    contents are entries that our configuration does not have, and are kept: those of the config.json that the model was
    read from (`load_hf`), or single ones such as max_position_embeddings (default 2048 for a LLaMA), bos_token_id and
    eos_token_id (default null). The configuration's own entries override them.

    Raises UserError for contents of another kind of model, and for a model that transformers cannot express: a LLaMA
    whose hidden_size is not a multiple of its heads, a GPT with rope, fewer key heads or another head width, a
    TransNormer with another decay or epsilon, a Linear Transformer.
    """
    family, contents = _family(config), contents or {}
    family.check(config)
    _check_read(contents, family)
    longest, table = contents.get("max_position_embeddings"), config.max_position_embeddings
    if table is not None and longest not in (None, table):
        raise UserError(
            f"max_position_embeddings is {longest} and the model's table of positions has {table} entries; leave it out"
        )
    pad = contents.get("pad_token_id")
    if pad is not None and not -config.vocabulary <= pad < config.vocabulary:
        raise UserError(
            f"{CONFIG}: pad_token_id is {pad} and vocab_size {config.vocabulary}, which transformers does not load; "
            "leave it out of the contents"
        )
    kept = {key: value for key, value in contents.items() if key not in NOT_KEPT | family.REPLACED}
    kept = {key: value for key, value in kept.items() if value is not None or key not in family.UNSAID}
    fixed = {key: values[0] for key, values in family.SUPPORTED.items() if values[0] is not None}
    # transformers' defaults are ids of its own vocabularies, which this one may not have.
    unsaid = {"bos_token_id": None, "eos_token_id": None} | family.UNSAID
    return unsaid | fixed | kept | family.config_to_hf(config)


def from_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return our state dict. Raises UserError for missing, unknown, misshapen, wrongly tied or non-finite weights."""
    family = _family(config)
    sizes = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocabulary,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads x kv_channels": config.num_attention_heads * config.head_dim,
        "max_position_embeddings": config.max_position_embeddings or 1,
    }
    check_sizes(state, config.num_layers, sizes)
    shapes = shapes_of(config)
    state = {_whole_name(name, family.PREFIX): weight for name, weight in state.items()}
    state = {name: weight for name, weight in state.items() if not family.DERIVED.fullmatch(name)}
    if sinks := sorted(name for name in state if name.endswith(".sinks")):
        raise UserError(
            f"{sinks[0]} holds attention sinks, and a model of model_type {config.model_type} has none there, so that "
            "other tokens would get their share; take a checkpoint without sinks: gpt-oss is not read"
        )
    if not config.untie_embeddings_and_output_weights and "lm_head.weight" in state:
        output, embedding = state.pop("lm_head.weight"), state.get(family.EMBEDDING)
        if embedding is not None and not torch.equal(output, embedding):
            raise UserError(f"lm_head.weight differs from {family.EMBEDDING}, yet tie_word_embeddings is true")
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    check_state(state, {name: weight.shape for name, weight in family.to_theirs(empty, config).items()})
    return family.to_ours(state, shapes)


def _whole_name(name: str, prefix: str) -> str:
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict of their module for ours, a tied lm_head.weight included.

    Raises UserError for missing, unknown or misshapen weights, and for a model that transformers cannot express.
    """
    family = _family(config)
    family.check(config)
    check_state(state, shapes_of(config))
    theirs = family.to_theirs(state, config)
    if not config.untie_embeddings_and_output_weights:
        theirs["lm_head.weight"] = theirs[family.EMBEDDING]
    return theirs


def load_hf(folder: str | Path) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Any]]:
    """Load a Hugging Face folder, sharded or not: configuration, our state dict (CPU, dtypes as stored), config.json.

    Pass the contents of config.json to `save_hf` to keep entries that our configuration has no field for.

    Reads only safetensors, never pickles, and only files directly in the folder, whatever an index names. Raises
    UserError naming the file and what is wrong with it.
    """
    folder = Path(folder)
    contents = read_json(folder / CONFIG)
    config = config_from_hf(contents)
    if not (folder / INDEX).exists():
        return config, from_hf(read_weights(folder / WEIGHTS), config), contents
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise UserError(f"{folder / INDEX}: weight_map is missing or not a table of file names; download it again")
    state: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise UserError(f"{folder / INDEX}: names {file!r}, which is no safetensors file directly in this folder")
        shard = read_weights(folder / file)
        lacking = [name for name, where in index.items() if where == file and name not in shard]
        if lacking:
            raise UserError(f"{folder / file}: lacks {lacking[0]}, which {INDEX} places there; download it again")
        state |= {name: shard[name] for name in shard if index.get(name) == file}
    return config, from_hf(state, config), contents


def save_hf(
    folder: str | Path, config: ModelConfig, state: Mapping[str, Tensor], contents: Mapping[str, Any] | None = None
) -> None:
    """Write our state dict as config.json and model.safetensors, for transformers' from_pretrained.

    contents as for `config_to_hf`. Creates the folder. Raises UserError, and writes nothing, if the folder holds a
    model or is not writable, and as `config_to_hf` and `to_hf` do.
    """
    described, theirs = config_to_hf(config, contents), to_hf(state, config)
    if not config.untie_embeddings_and_output_weights:
        del theirs["lm_head.weight"]  # transformers ties it again
    dtype = str(theirs[_family(config).EMBEDDING].dtype).removeprefix("torch.")
    write_folder(Path(folder), theirs, described | {"torch_dtype": dtype})
