"""Convert between Hugging Face models and ours: configurations, state dicts and safetensors
folders.

The families' tables are in model/families. Tensors are converted one by one if asked.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import DecoderConfig
from model.families import FAMILIES
from model.hf.adapter import CONFIG as ADAPTER
from model.hf.family import TIED, TOKEN_IDS, Contents, Family
from model.hf.folder import (
    CONFIG,
    Read,
    Weights,
    check_described,
    check_sizes,
    described,
    finite,
    inside,
    naming,
    new_folder,
    read_json,
    shown,
    unsupported,
    write_model,
)
from model.registry import architecture_of, meta_state
from runtime.errors import UserError, with_article

NOT_KEPT = {"auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Entries that describe the files, not the model."""
HUGGING_FACE = {table.kind: table for family in FAMILIES.values() for table in family.hugging_face}
"""Families of Hugging Face's by the model_type in config.json."""


def families(config: DecoderConfig) -> tuple[Family, ...]:
    """Return Hugging Face's families of a model_type of ours."""
    tables = FAMILIES[config.model_type].hugging_face
    if not tables:
        ours = [name for name, family in FAMILIES.items() if family.hugging_face]
        raise UserError(
            f"model_type is {config.model_type}, which Hugging Face has no model of; only {_listed(ours)}"
        )
    windows = any("sliding_window" in table.known for table in tables)
    for name, default in (("window_size", None), ("softmax_type", "vanilla")):
        value = getattr(config, name, default)
        if value != default and (name != "window_size" or not windows):
            raise UserError(
                f"{name} is {value}, and Hugging Face's {config.model_type} has neither windows nor sinks; only "
                f"{'none' if default is None else default} can be read and written, keep others in their checkpoints"
            )
    return tables


def family_of(config: DecoderConfig, preferred: str | None = None) -> Family:
    """Return the preferred family, or else the first, that can express the model."""
    problems = []
    found = families(config)
    for family in sorted(found, key=lambda one: one.kind != preferred):
        try:
            family.refuse(config)
        except UserError as problem:
            problems.append(str(problem))
        else:
            return family
    raise UserError("; ".join([*dict.fromkeys(problems), "keep it in its checkpoint"]))


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def family_in(hf: Contents) -> Family:
    """Return the family of a config.json, by default the first: the files of old LLaMAs name none.

    Raises UserError for another model.
    """
    kind = hf.get("model_type", next(iter(HUGGING_FACE)))
    if kind not in list(HUGGING_FACE):  # not in the dict: JSON lists are unhashable
        known = [family.whole or kind for kind, family in HUGGING_FACE.items()]
        raise unsupported("model_type", kind, f"; only {_listed(known)} are")
    others = (one for one in HUGGING_FACE.values() if one.instead_of == kind and one.told_by in hf)
    return next(others, HUGGING_FACE[kind])


def text_entries(hf: Contents) -> Contents:
    """Return the entries of the text model in a config.json of a model that has other parts;
    otherwise all.
    """
    family = next(
        (one for one in HUGGING_FACE.values() if one.whole and one.whole == hf.get("model_type")),
        None,
    )
    if family is None:
        return hf
    inner = hf.get(family.nested)
    if not isinstance(inner, dict):
        raise unsupported(family.nested, inner, "; only a table is")
    outer = {
        key: hf[key]
        for key in (*TOKEN_IDS, "quantization_config")
        if key in hf and key not in inner
    }
    tied = {TIED: hf[TIED]} if TIED in hf else {}  # transformers looks at the outer one
    return {"model_type": family.kind} | outer | inner | tied


def config_from_hf(hf: Mapping[str, Any], folder: Path = Path()) -> DecoderConfig:
    """Build a DecoderConfig from the contents of a folder's config.json.

    Raises UserError naming a key that is missing, of the wrong type, not supported (another
    activation, ...), or not known to change nothing.
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

    contents are entries that our configuration does not have, and are kept: those of the
    config.json that the model was read from (`load_hf`), or single ones such as
    max_position_embeddings (default 2048 for a LLaMA), bos_token_id and eos_token_id (default
    null). The configuration's own entries override them.

    contents that describe this very model are returned as they are. A LLaMA becomes the first of
    LLaMA, Mistral, Ministral, Qwen2 and Qwen3 that can express it, that of the contents before
    others: one whose hidden_size is not a multiple of its heads is a Mistral without a window to
    transformers.

    Raises UserError for contents of another kind of model, and for a model that transformers cannot
    express: a LLaMA with biases and norms of q and k, a GPT with rope, fewer key heads or another
    head width, a TransNormer with another decay or epsilon, a Linear Transformer.
    """
    contents = text_entries(contents or {})
    names = [one.kind for one in families(config)]
    if "model_type" in contents and (kind := contents["model_type"]) not in names:
        raise unsupported("model_type", kind, f"; only {' or '.join(map(shown, names))} is")
    came = family_in(contents) if "model_type" in contents else None
    family = family_of(config, None if came is None else came.kind)
    (came or family).check(contents)
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
    return kept if came is family and _describes(kept, config) else family.write(config, kept)


def _describes(contents: Mapping[str, Any], config: DecoderConfig) -> bool:
    """Return whether a whole config.json is of this very model."""
    if "architectures" not in contents:
        return False
    try:
        read = config_from_hf(contents)
    except UserError:
        return False
    kept = ("max_position_embeddings", "init_method_std")
    same = all(getattr(read, name) == getattr(config, name) for name in kept)
    return same and architecture_of(read) == architecture_of(config)


class Joined(Mapping[str, Tensor]):
    """A state whose modules that are stored in parts are whole, joined as they are read."""

    def __init__(self, state: Mapping[str, Tensor], apart: Mapping[str, Sequence[str]]) -> None:
        """Look for the modules of ``apart``, each with its parts in their order."""
        self._state, self._parts = state, {name: [name] for name in state}
        for whole, parts in apart.items():
            for first in [name for name in state if parts[0] in name]:
                names = [first.replace(parts[0], part) for part in parts]
                if all(name in self._parts for name in names):
                    self._parts = {
                        name: own for name, own in self._parts.items() if name not in names
                    }
                    self._parts[first.replace(parts[0], whole)] = names

    def __getitem__(self, name: str) -> Tensor:
        parts = [self._state[part] for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def from_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return our state dict. Raises UserError for missing, unknown, misshapen, wrongly tied or
    non-finite weights.
    """
    ours, read = our_weights(state, config)
    return {name: read(name) for name in ours}


def our_weights(
    state: Mapping[str, Tensor], config: DecoderConfig, tell: Callable[[str], Any] = warnings.warn
) -> tuple[dict[str, Tensor], Read]:
    """Return meta tensors of our parameters, and what reads one of theirs as ours; the state may be
    ``Weights``.

    ``tell`` takes a line of what is passed over. Raises UserError as ``from_hf``: for non-finite
    values when they are read, for the rest now.
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
    names = {
        name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name: name
        for name in found
    }
    names = {
        whole: name for whole, name in names.items() if not re.fullmatch(family.derived, whole)
    }
    if passed := sorted(name for name in names if re.fullmatch(family.skipped, name)):
        parts = ", ".join(
            dict.fromkeys(re.sub(r"^(model\.)?(\w+)\..*", r"\1\2", name) for name in passed)
        )
        kind = with_article(config.model_type)
        tell(
            f"note: {len(passed)} weights of {parts} are passed over: they are no part of {kind} here"
        )
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
            raise UserError(
                f"lm_head.weight differs from {whole_embedding}, yet tie_word_embeddings is true"
            )
    metas = {whole: found[name] for whole, name in names.items()}
    check_described(metas, table.to_theirs(ours, config))
    whole = finite(lambda name: state[names[name]])
    ours = {name: table.ours(metas.__getitem__, name, config) for name in ours}
    return ours, lambda name: table.ours(whole, name, config)


def to_hf(state: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return the state dict of their module for ours, a tied lm_head.weight included.

    Raises UserError for missing, unknown or misshapen weights, and for a model that transformers
    cannot express.
    """
    described_theirs, read = their_weights(described(state), state.__getitem__, config)
    theirs = {name: read(name) for name in described_theirs}
    if not config.untie_embeddings_and_output_weights:
        theirs["lm_head.weight"] = theirs[family_of(config).embedding]
    return theirs


def their_weights(
    ours: Mapping[str, Tensor], read: Read, config: DecoderConfig
) -> tuple[dict[str, Tensor], Read]:
    """Return meta tensors of their parameters, without tied copies, and what reads one of ours as
    theirs.

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
    """Return the contents of a folder's config.json. Raises UserError for a file, or a folder of
    adapters.
    """
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a model")
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder / ADAPTER}: the folder holds adapters, which transformers loads on the model that they name; "
            "import that model with tools.convert_hf import MODEL RUN --adapter FOLDER, or take the file out"
        )
    return read_json(inside(folder, CONFIG))


def open_hf(
    folder: Path, tell: Callable[[str], Any] = warnings.warn
) -> tuple[DecoderConfig, dict[str, Tensor], Read]:
    """Return a folder's configuration, meta tensors of our parameters, and what reads one.
    UserError as load_hf.
    """
    config = config_from_hf(read_config(folder), folder)
    return config, *our_weights(Weights(folder, tell), config, tell)


def load_hf(folder: str | Path) -> tuple[DecoderConfig, dict[str, Tensor], dict[str, Any]]:
    """Load a Hugging Face folder, sharded or not: configuration, our state dict (CPU, dtypes as
    stored), config.json.

    Pass the contents of config.json to `save_hf` to keep entries that our configuration has no
    field for.

    Reads only safetensors, never pickles, and only files directly in the folder, whatever an index
    names. Raises UserError naming the file and what is wrong with it.
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
    """Write our state dict as config.json and model.safetensors, for transformers' from_pretrained.

    contents as for `config_to_hf`. Creates the folder. Raises UserError, and writes nothing, if the
    folder holds anything or is not writable, and as `config_to_hf` and `to_hf` do.
    """
    said = config_to_hf(config, contents)
    theirs, read = their_weights(
        described(state), state.__getitem__, config
    )  # transformers ties lm_head.weight again
    dtype = str(theirs[family_of(config).embedding].dtype).removeprefix("torch.")
    with new_folder(Path(folder)) as draft:
        write_model(draft, theirs, said | {"torch_dtype": dtype}, read)
