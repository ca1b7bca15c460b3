"""The families of Hugging Face's models that we read and write, and their configurations.

Each family has its file: llama.py (LLaMA, Mistral, Qwen2 and Qwen3), gpt2.py (GPT2LMHeadModel) and transnormer.py (the
released TransNormerLLM checkpoints).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from model.config import ModelConfig, architecture_of
from model.hf import gpt2, llama, transnormer
from model.hf.folder import CONFIG, entry, shown
from model.hf.names import Read
from runtime.errors import UserError

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NOT_KEPT = {"auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version", "_name_or_path"}
"""Entries that describe the files, not the model."""


class Family(Protocol):
    """Interface of a family's module."""

    OURS: str
    """Our model_type."""
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

    def to_ours(self, theirs: Read, names: Iterable[str]) -> dict[str, Tensor]: ...

    def to_theirs(self, ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]: ...


_ALL: tuple[Family, ...] = (llama.Llama(), llama.Mistral(), llama.Qwen2(), llama.Qwen3(), gpt2, transnormer)
FAMILIES = {family.SUPPORTED["model_type"][0]: family for family in _ALL}
"""By the model_type in config.json; of several that can write a model of ours, the first one does."""


def families(config: ModelConfig) -> list[Family]:
    """Return the families of a model_type of ours."""
    found = [family for family in FAMILIES.values() if config.model_type == family.OURS]
    if not found:
        kinds = dict.fromkeys(family.OURS for family in FAMILIES.values())
        raise UserError(f"model_type is {config.model_type}, which Hugging Face has no model of; only {_listed(kinds)}")
    for name, default in (("window_size", None), ("softmax_type", "vanilla")):
        value = getattr(config, name)
        if value != default and (name != "window_size" or config.model_type != "llama"):
            raise UserError(
                f"{name} is {value}, and Hugging Face's {config.model_type} has neither windows nor sinks; only "
                f"{'none' if default is None else default} can be read and written, keep others in their checkpoints"
            )
    return found


def family_of(config: ModelConfig, preferred: Any = None) -> Family:
    """Return the preferred family, or else the first, that can express the model."""
    problems = []
    found = families(config)
    for family in sorted(found, key=lambda one: one.SUPPORTED["model_type"][0] != preferred):
        try:
            family.check(config)
        except UserError as problem:
            problems.append(str(problem))
        else:
            return family
    if len(found) > 1:
        problems.append("keep it in its checkpoint")
    raise UserError("; ".join(dict.fromkeys(problems)))


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from a config.json's contents; ignore keys that do not change the computation.

    Without a model_type, assume a LLaMA. Raises UserError naming a key that is missing, of the wrong type, or not
    supported (rope_scaling, another activation, ...).
    """
    kind = hf.get("model_type", "llama")
    if kind not in list(FAMILIES):  # not in the dict: JSON lists are unhashable
        raise UserError(f"{CONFIG}: model_type = {shown(kind)} is not supported; only {_listed(FAMILIES)} are")
    try:
        _check_read(hf, FAMILIES[kind])
        found = FAMILIES[kind].config_from_hf(hf)
    except KeyError as missing:
        raise UserError(f"{CONFIG}: {missing.args[0]} is missing; this is no {kind}'s configuration") from None
    except ValueError as error:
        reason = str(error).removeprefix(f"{CONFIG}: ")
        raise UserError(f"{CONFIG}: {reason}") from None
    return found


def _check_read(contents: Mapping[str, Any], family: Family) -> None:
    """Raise UserError for entries of an unsupported model, or that transformers cannot read."""
    for key, supported in (family.SUPPORTED | {"quantization_config": (None,)}).items():
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

    contents that describe this very model are returned as they are. A LLaMA becomes the first of LLaMA, Mistral, Qwen2
    and Qwen3 that can express it, that of the contents before others: one whose hidden_size is not a multiple of its
    heads is a Mistral without a window to transformers.

    Raises UserError for contents of another kind of model, and for a model that transformers cannot express: a LLaMA
    with biases and norms of q and k, or with a window in some layers and no such setting, a GPT with rope, fewer key
    heads or another head width, a TransNormer with another decay or epsilon, a Linear Transformer.
    """
    contents = contents or {}
    family = family_of(config, contents.get("model_type"))
    if contents.get("model_type") in [one.SUPPORTED["model_type"][0] for one in families(config)]:
        contents = {**contents, "model_type": family.SUPPORTED["model_type"][0]}
    _check_read(contents, family)
    longest, table = contents.get("max_position_embeddings"), config.position_table
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
    kept = {key: value for key, value in contents.items() if key not in NOT_KEPT}
    kept = {key: value for key, value in kept.items() if value is not None or key not in family.UNSAID}
    if _describes(kept, config, family):
        return kept
    kept = {key: value for key, value in kept.items() if key not in family.REPLACED}
    fixed = {key: values[0] for key, values in family.SUPPORTED.items() if values[0] is not None}
    # transformers' defaults are ids of its own vocabularies, which this one may not have.
    unsaid = {"bos_token_id": None, "eos_token_id": None} | family.UNSAID
    return unsaid | fixed | kept | family.config_to_hf(config)


def _describes(contents: Mapping[str, Any], config: ModelConfig, family: Family) -> bool:
    """Return whether a whole config.json is of this very model."""
    if "model_type" not in contents or "architectures" not in contents:
        return False
    try:
        read = family.config_from_hf(contents)
    except (KeyError, ValueError):
        return False
    kept = ("max_position_embeddings", "init_method_std")
    same = all(getattr(read, name) == getattr(config, name) for name in kept)
    return same and architecture_of(read) == architecture_of(config)
