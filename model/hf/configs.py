"""Convert config.json: find the table for a model, and read or write the model's entries."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model.config import DecoderConfig
from model.families import FAMILIES
from model.hf.adapter import CONFIG as ADAPTER
from model.hf.entries import CONFIG, naming, read_json, shown, unsupported
from model.hf.family import TIED, TOKEN_IDS, Contents, Family
from model.hf.folder import inside
from model.registry import architecture_of
from runtime.errors import UserError

NOT_COPIED = {"auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Entries of config.json that describe the files, not the model."""
HUGGING_FACE = {table.kind: table for family in FAMILIES.values() for table in family.hugging_face}
"""Tables of transformers' models, keyed by the model_type in config.json."""


def families(config: DecoderConfig) -> tuple[Family, ...]:
    """Return the transformers models that may express this model. Raises UserError if none can."""
    tables = FAMILIES[config.model_type].hugging_face
    if not tables:
        ours = [name for name, family in FAMILIES.items() if family.hugging_face]
        raise UserError(
            f"model_type is {config.model_type}, but Hugging Face has no such model; only "
            f"{_listed(ours)} can be converted"
        )
    has_windows = any("sliding_window" in table.known for table in tables)
    window_size = getattr(config, "window_size", None)
    if window_size is not None and not has_windows:
        raise _unlike(config, "window_size", window_size, "left out")
    softmax_type = getattr(config, "softmax_type", "vanilla")
    if softmax_type != "vanilla":
        raise _unlike(config, "softmax_type", softmax_type, "vanilla")
    return tables


def _unlike(config: DecoderConfig, name: str, value: str, only: str) -> UserError:
    return UserError(
        f"{name} is {value}, but for Hugging Face's {config.model_type} it must be {only}; "
        "keep the model in its Longmesh checkpoint"
    )


def family_of(config: DecoderConfig, preferred: str | None = None) -> Family:
    """Return the first transformers model that can express this one, trying ``preferred`` first."""
    problems = []
    for family in sorted(families(config), key=lambda candidate: candidate.kind != preferred):
        try:
            family.refuse(config)
        except UserError as error:
            problems.append(str(error))
        else:
            return family
    raise UserError("; ".join([*dict.fromkeys(problems), "keep the model in its checkpoint"]))


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def family_in(hf: Contents) -> Family:
    """Return the table for the model of a config.json. Raises UserError for an unknown model.

    A file without a model_type gets the first table, LLaMA's, since the original LLaMA files have
    none.
    """
    kinds = list(HUGGING_FACE)
    kind = hf.get("model_type", kinds[0])
    if kind not in kinds:  # not a dictionary lookup, since JSON lists are unhashable
        names = [family.outer or name for name, family in HUGGING_FACE.items()]
        raise unsupported("model_type", kind, f"; only {_listed(names)} are")
    for family in HUGGING_FACE.values():
        if family.instead_of == kind and family.marker in hf:
            return family
    return HUGGING_FACE[kind]


def text_entries(hf: Contents) -> Contents:
    """Return the entries of the text model: a nested table of config.json, or else all entries."""
    for family in HUGGING_FACE.values():
        if family.outer and family.outer == hf.get("model_type"):
            break
    else:
        return hf

    inner = hf.get(family.nested)
    if not isinstance(inner, dict):
        raise unsupported(family.nested, inner, "; only a table is")
    entries: dict[str, Any] = {"model_type": family.kind}
    for key in (*TOKEN_IDS, "quantization_config"):
        if key in hf and key not in inner:
            entries[key] = hf[key]
    entries |= inner
    if TIED in hf:  # transformers reads this entry from the outer table
        entries[TIED] = hf[TIED]
    return entries


def config_from_hf(hf: Mapping[str, Any], folder: Path = Path()) -> DecoderConfig:
    """Build Longmesh's configuration from the contents of a folder's config.json.

    Raises:
        UserError: the message names a key that is missing, has the wrong type, is not supported
            (another activation, ...), or is unknown and might change what is computed.
    """
    with naming(folder / CONFIG):
        hf = text_entries(hf)
        family = family_in(hf)
    with naming(folder / CONFIG, f"this is not a configuration of {family.kind}"):
        family.check(hf)
        return family.read(hf)


def config_to_hf(
    config: DecoderConfig, contents: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the contents of a config.json from which transformers builds the same model.

    A LLaMA becomes the model that ``contents`` names if that can express it, else the first of
    LLaMA, Mistral, Ministral, Qwen2 and Qwen3 that can: for example a Mistral without a window if
    hidden_size is not a multiple of the number of heads.

    Args:
        contents: entries to copy that Longmesh's configuration lacks: the config.json that the
            model was read from (`load_hf`), or single ones such as max_position_embeddings (default
            2048 for a LLaMA), bos_token_id and eos_token_id (default null). The configuration's
            entries override them. Contents that describe this very model are returned unchanged.

    Raises:
        UserError: the contents are of another kind of model, or transformers cannot express the
            model: a LLaMA with both biases and norms of q and k, a GPT with rope, fewer key heads
            or another head width, a TransNormer with another decay or epsilon, or a Linear
            Transformer.
    """
    contents = text_entries(contents or {})
    kinds = [family.kind for family in families(config)]
    source = None
    if "model_type" in contents:
        kind = contents["model_type"]
        if kind not in kinds:
            raise unsupported("model_type", kind, f"; only {' or '.join(map(shown, kinds))} is")
        source = family_in(contents)
    family = family_of(config, None if source is None else source.kind)
    (source or family).check(contents)
    _check_sizes_fit(config, contents)

    copied = {key: value for key, value in contents.items() if key not in NOT_COPIED}
    if source is family and _describes(copied, config):
        return copied
    return family.write(config, copied)


def _check_sizes_fit(config: DecoderConfig, contents: Contents) -> None:
    """Raise UserError for contents with which transformers could not load the model."""
    longest = contents.get("max_position_embeddings")
    table = config.position_table
    if table is not None and longest not in (None, table):
        raise UserError(
            f"max_position_embeddings is {longest}, but the model's table of positions has {table} "
            "entries; leave out max_position_embeddings"
        )
    pad = contents.get("pad_token_id")
    if pad is not None and not -config.vocabulary <= pad < config.vocabulary:
        raise UserError(
            f"{CONFIG}: pad_token_id is {pad}, but vocab_size is {config.vocabulary}, so "
            "transformers could not load the model; leave pad_token_id out of the contents"
        )


def _describes(contents: Mapping[str, Any], config: DecoderConfig) -> bool:
    """Return True if a complete config.json describes exactly this model."""
    if "architectures" not in contents:
        return False
    try:
        read = config_from_hf(contents)
    except UserError:
        return False
    for name in ("max_position_embeddings", "init_method_std"):  # architecture_of lacks them
        if getattr(read, name) != getattr(config, name):
            return False
    return architecture_of(read) == architecture_of(config)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json.

    Raises:
        UserError: the path is a file, a folder of adapters, or its config.json cannot be read.
    """
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a model")
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder / ADAPTER}: the folder has adapters, which transformers would load on the "
            "base model that this file names; import the base model with "
            "tools.convert_hf import MODEL RUN --adapter FOLDER, or remove the file"
        )
    return read_json(inside(folder, CONFIG))
