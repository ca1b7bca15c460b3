"""Convert config.json: find the table that describes a model, and read or write its entries."""

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
"""Entries that describe the files, not the model."""
HUGGING_FACE = {table.kind: table for family in FAMILIES.values() for table in family.hugging_face}
"""Models of transformers by the model_type in config.json."""


def families(config: DecoderConfig) -> tuple[Family, ...]:
    """Return the models of transformers that may express one of ours. Raises UserError for none."""
    tables = FAMILIES[config.model_type].hugging_face
    if not tables:
        ours = [name for name, family in FAMILIES.items() if family.hugging_face]
        raise UserError(
            f"model_type is {config.model_type}, which Hugging Face has no model of; only "
            f"{_listed(ours)}"
        )
    has_windows = any("sliding_window" in table.known for table in tables)
    window_size = getattr(config, "window_size", None)
    if window_size is not None and not has_windows:
        raise _unlike(config, "window_size", window_size, "none")
    softmax_type = getattr(config, "softmax_type", "vanilla")
    if softmax_type != "vanilla":
        raise _unlike(config, "softmax_type", softmax_type, "vanilla")
    return tables


def _unlike(config: DecoderConfig, name: str, value: str, only: str) -> UserError:
    return UserError(
        f"{name} is {value}, and Hugging Face's {config.model_type} has neither windows nor sinks; "
        f"only {only} can be read and written, keep others in their checkpoints"
    )


def family_of(config: DecoderConfig, preferred: str | None = None) -> Family:
    """Return the first model of transformers that can express ours, trying ``preferred`` first."""
    problems = []
    for family in sorted(families(config), key=lambda candidate: candidate.kind != preferred):
        try:
            family.refuse(config)
        except UserError as error:
            problems.append(str(error))
        else:
            return family
    raise UserError("; ".join([*dict.fromkeys(problems), "keep it in its checkpoint"]))


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


def family_in(hf: Contents) -> Family:
    """Return the model that a config.json describes. Raises UserError for an unknown one.

    Without a model_type it is the first, a LLaMA: the files of the original ones have none.
    """
    kinds = list(HUGGING_FACE)
    kind = hf.get("model_type", kinds[0])
    if kind not in kinds:  # not in the dict: JSON lists are unhashable
        names = [family.outer or name for name, family in HUGGING_FACE.items()]
        raise unsupported("model_type", kind, f"; only {_listed(names)} are")
    for family in HUGGING_FACE.values():
        if family.instead_of == kind and family.marker in hf:
            return family
    return HUGGING_FACE[kind]


def text_entries(hf: Contents) -> Contents:
    """Return the entries of the text model, if a config.json has them in a table, otherwise all."""
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
    if TIED in hf:  # transformers reads the outer one
        entries[TIED] = hf[TIED]
    return entries


def config_from_hf(hf: Mapping[str, Any], folder: Path = Path()) -> DecoderConfig:
    """Build our configuration from the contents of a folder's config.json.

    Raises:
        UserError: naming a key that is missing, of the wrong type, not supported (another
            activation, ...), or unknown, which might change what is computed.
    """
    with naming(folder / CONFIG):
        hf = text_entries(hf)
        family = family_in(hf)
    with naming(folder / CONFIG, f"this is no {family.kind}'s configuration"):
        family.check(hf)
        return family.read(hf)


def config_to_hf(
    config: DecoderConfig, contents: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the contents of a config.json that transformers reads as the same model.

    A LLaMA becomes the first of LLaMA, Mistral, Ministral, Qwen2 and Qwen3 that can express it,
    after that of the contents: if hidden_size is not a multiple of the heads, for example, it is a
    Mistral without a window.

    Args:
        contents: entries that our configuration lacks, to be copied: the config.json that the model
            was read from (`load_hf`), or single ones such as max_position_embeddings (default 2048
            for a LLaMA), bos_token_id and eos_token_id (default null). The configuration's entries
            override them. Contents that describe this very model are returned unchanged.

    Raises:
        UserError: contents of another kind of model, and a model that transformers cannot express:
            a LLaMA with biases and norms of q and k, a GPT with rope, fewer key heads or another
            head width, a TransNormer with another decay or epsilon, a Linear Transformer.
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
    """Raise UserError for contents with which transformers would not load the model."""
    longest = contents.get("max_position_embeddings")
    table = config.position_table
    if table is not None and longest not in (None, table):
        raise UserError(
            f"max_position_embeddings is {longest} and the model's table of positions has {table} "
            "entries; leave it out"
        )
    pad = contents.get("pad_token_id")
    if pad is not None and not -config.vocabulary <= pad < config.vocabulary:
        raise UserError(
            f"{CONFIG}: pad_token_id is {pad} and vocab_size {config.vocabulary}, which "
            "transformers does not load; leave it out of the contents"
        )


def _describes(contents: Mapping[str, Any], config: DecoderConfig) -> bool:
    """Return whether a complete config.json describes this very model."""
    if "architectures" not in contents:
        return False
    try:
        read = config_from_hf(contents)
    except UserError:
        return False
    for name in ("max_position_embeddings", "init_method_std"):  # not in architecture_of
        if getattr(read, name) != getattr(config, name):
            return False
    return architecture_of(read) == architecture_of(config)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json.

    Raises:
        UserError: a file, a folder of adapters, or a file that cannot be read.
    """
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a model")
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder / ADAPTER}: the folder holds adapters, which transformers loads on the model "
            "that they name; import that model with "
            "tools.convert_hf import MODEL RUN --adapter FOLDER, or take the file out"
        )
    return read_json(inside(folder, CONFIG))
