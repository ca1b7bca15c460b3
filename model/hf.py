"""Hugging Face models <-> ours: configurations, state dicts and safetensors folders.

What differs from family to family stands in hf_llama.py (LlamaForCausalLM), hf_gpt2.py (GPT2LMHeadModel) and
hf_transnormer.py (the released TransNormerLLM checkpoints).
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from model import hf_gpt2, hf_llama, hf_transnormer
from model.config import ModelConfig
from model.registry import shapes_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Family(Protocol):
    """What a module about one family has."""

    SUPPORTED: dict[str, Any]
    """Keys of config.json that could ask for what our model does not compute, and the one value that does not."""
    EMBEDDING: str
    """Their name of the embedding's weight, to which lm_head.weight can be tied."""
    DERIVED: re.Pattern[str]
    """Names in old checkpoints that hold no weights."""
    PREFIX: str
    """What all names but lm_head's begin with, and some files leave out."""

    def check(self, config: ModelConfig) -> None: ...

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig: ...

    def config_to_hf(self, config: ModelConfig, max_position_embeddings: int | None) -> dict[str, Any]: ...

    def to_ours(self, theirs: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]: ...

    def to_theirs(self, ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]: ...


FAMILIES: dict[str, Family] = {"llama": hf_llama, "gpt": hf_gpt2, "transnormer": hf_transnormer}


def _family(config: ModelConfig) -> Family:
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type is {config.model_type}, which Hugging Face has no model of; only {_listed(FAMILIES)}"
        )
    return FAMILIES[config.model_type]


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json's contents; keys that change nothing we compute are passed over.

    Without a model_type it is taken for a LLaMA's. ValueError names the key that is missing or asks for what we do not
    support (rope_scaling, another activation, ...).
    """
    by_type = {family.SUPPORTED["model_type"]: family for family in FAMILIES.values()}
    kind = hf.get("model_type", "llama")
    if kind not in by_type:
        raise ValueError(f"{CONFIG}: model_type = {kind!r} is not supported; only {_listed(by_type)} are")
    for key, supported in by_type[kind].SUPPORTED.items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"{CONFIG}: {key} = {hf[key]!r} is not supported; only {supported!r} is")
    try:
        return by_type[kind].config_from_hf(hf)
    except KeyError as missing:
        raise ValueError(f"{CONFIG}: {missing.args[0]} is missing; this is no {kind}'s configuration") from None


def config_to_hf(config: ModelConfig, max_position_embeddings: int | None = None) -> dict[str, Any]:
    """The contents of a config.json that transformers reads as the same model.

    max_position_embeddings is the longest sequence that readers should feed a LLaMA, 2048 where it is left out. A GPT's
    table decides it. ValueError for a GPT that theirs cannot be (rope, fewer key heads, heads of another width), for a
    TransNormer of another decay or epsilon, and for a Linear Transformer.
    """
    family = _family(config)
    family.check(config)
    fixed = {key: value for key, value in family.SUPPORTED.items() if value is not None}
    return family.config_to_hf(config, max_position_embeddings) | fixed


def from_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict. ValueError for missing, unknown, misshapen or wrongly tied weights."""
    family, shapes = _family(config), shapes_of(config)
    state = {_whole_name(name, family.PREFIX): weight for name, weight in state.items()}
    state = {name: weight for name, weight in state.items() if not family.DERIVED.fullmatch(name)}
    if not config.untie_embeddings_and_output_weights and "lm_head.weight" in state:
        output, embedding = state.pop("lm_head.weight"), state.get(family.EMBEDDING)
        if embedding is not None and not torch.equal(output, embedding):
            raise ValueError(f"lm_head.weight differs from {family.EMBEDDING}, yet tie_word_embeddings is true")
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    check_state(state, {name: weight.shape for name, weight in family.to_theirs(empty, config).items()})
    return family.to_ours(state, shapes)


def _whole_name(name: str, prefix: str) -> str:
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What their module's state_dict() holds for our state dict, a tied lm_head.weight included.

    ValueError for missing, unknown or misshapen weights, and for a model that theirs cannot be.
    """
    family = _family(config)
    family.check(config)
    check_state(state, shapes_of(config))
    theirs = family.to_theirs(state, config)
    if not config.untie_embeddings_and_output_weights:
        theirs["lm_head.weight"] = theirs[family.EMBEDDING]
    return theirs


def check_state(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """ValueError for missing, unknown or misshapen weights."""
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    for problem, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"The state dict {problem} {names[0]}{more}; it is not of this configuration")
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}; the configuration makes it {tuple(shape)}")


def load_hf(folder: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and our state dict (CPU, dtypes as stored) of a Hugging Face folder, sharded or not.

    Only safetensors are read, never pickles, and only files directly in the folder, whatever an index names.
    ValueError names the file and what is wrong with it.
    """
    folder = Path(folder)
    config = config_from_hf(read_json(folder / CONFIG))
    if not (folder / INDEX).exists():
        return config, from_hf(read_weights(folder / WEIGHTS), config)
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{folder / INDEX}: weight_map is missing or not a table of file names; download it again")
    state: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX}: names {file!r}, which is no safetensors file directly in this folder")
        shard = read_weights(folder / file)
        lacking = [name for name, where in index.items() if where == file and name not in shard]
        if lacking:
            raise ValueError(f"{folder / file}: lacks {lacking[0]}, which {INDEX} places there; download it again")
        state |= {name: shard[name] for name in shard if index.get(name) == file}
    return config, from_hf(state, config)


def save_hf(
    folder: str | Path, config: ModelConfig, state: Mapping[str, Tensor], max_position_embeddings: int | None = None
) -> None:
    """Write config.json and model.safetensors of our state dict; transformers' from_pretrained reads the folder.

    max_position_embeddings as for `config_to_hf`. The folder is made; ValueError where it holds a model already, and
    as `config_to_hf` and `to_hf` raise it.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    for file in (CONFIG, WEIGHTS, INDEX):
        if (folder / file).exists():
            raise ValueError(f"{folder / file} exists; choose a new folder, nothing is written over")
    contents = config_to_hf(config, max_position_embeddings)
    theirs = {name: weight.detach().contiguous() for name, weight in to_hf(state, config).items()}
    if not config.untie_embeddings_and_output_weights:
        del theirs["lm_head.weight"]  # transformers ties it again
    folder.mkdir(parents=True, exist_ok=True)
    save_file(theirs, folder / WEIGHTS, metadata={"format": "pt"})
    dtype = str(theirs[_family(config).EMBEDDING].dtype).removeprefix("torch.")
    (folder / CONFIG).write_text(json.dumps(contents | {"torch_dtype": dtype}, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object. ValueError names the file and what is wrong with it."""
    try:
        contents = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return contents


def read_weights(path: Path) -> dict[str, Tensor]:
    """A safetensors file's tensors, on the CPU. ValueError names the file and what is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; only safetensors are read, and all shards are needed") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); download it again") from None
