"""Configurations of Hugging Face's models from and to ours, by the tables of their families.

The tables are in llama.py (LLaMA and its kin), hybrids.py, gpt2.py and transnormer.py.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model.architecture import architecture_of
from model.config import ModelConfig
from model.hf import gpt2, hybrids, llama, transnormer
from model.hf.family import TIED, TOKEN_IDS, Contents, Family
from model.hf.folder import CONFIG, naming, shown, unsupported
from model.traits import LLAMAS
from runtime.errors import UserError

NOT_KEPT = {"auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Entries that describe the files, not the model."""
_ALL: tuple[Family, ...] = (
    *(llama.LLAMA, llama.MISTRAL, llama.MINISTRAL, llama.QWEN2, llama.QWEN3, gpt2.GPT2, transnormer.TRANSNORMER),
    *(llama.GEMMA3, llama.OLMO3, hybrids.QWEN3_5, hybrids.OLMO_HYBRID),
)
FAMILIES = {family.kind: family for family in _ALL}
"""By the model_type in config.json; of several that can write a model of ours, the first one does."""


def families(config: ModelConfig) -> list[Family]:
    """Return the families of a model_type of ours."""
    found = [family for family in FAMILIES.values() if config.model_type == family.ours]
    if not found:
        kinds = dict.fromkeys(family.ours for family in FAMILIES.values())
        raise UserError(f"model_type is {config.model_type}, which Hugging Face has no model of; only {_listed(kinds)}")
    for name, default in (("window_size", None), ("softmax_type", "vanilla")):
        value = getattr(config, name)
        if value != default and (name != "window_size" or config.model_type not in LLAMAS):
            raise UserError(
                f"{name} is {value}, and Hugging Face's {config.model_type} has neither windows nor sinks; only "
                f"{'none' if default is None else default} can be read and written, keep others in their checkpoints"
            )
    return found


def family_of(config: ModelConfig, preferred: str | None = None) -> Family:
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
    """Return the family of a config.json, by default LLaMA; a Mistral with layer_types is a Ministral to transformers.

    Raises UserError for another model.
    """
    kind = hf.get("model_type", "llama")
    if kind not in list(FAMILIES):  # not in the dict: JSON lists are unhashable
        known = [family.whole or kind for kind, family in FAMILIES.items()]
        raise unsupported("model_type", kind, f"; only {_listed(known)} are")
    return FAMILIES["ministral" if kind == "mistral" and "layer_types" in hf else kind]


def own_part(hf: Contents) -> Contents:
    """Return the entries of the text model in a config.json of a model that has other parts; otherwise all."""
    family = next((one for one in FAMILIES.values() if one.whole and one.whole == hf.get("model_type")), None)
    if family is None:
        return hf
    inner = hf.get(family.nested)
    if not isinstance(inner, dict):
        raise unsupported(family.nested, inner, "; only a table is")
    outer = {key: hf[key] for key in (*TOKEN_IDS, "quantization_config") if key in hf and key not in inner}
    tied = {TIED: hf[TIED]} if TIED in hf else {}  # transformers looks at the outer one
    return {"model_type": family.kind} | outer | inner | tied


def config_from_hf(hf: Mapping[str, Any], folder: Path = Path()) -> ModelConfig:
    """Build a ModelConfig from the contents of a folder's config.json.

    Raises UserError naming a key that is missing, of the wrong type, not supported (another activation, ...), or not
    known to change nothing.
    """
    with naming(folder / CONFIG):
        hf = own_part(hf)
        family = family_in(hf)
    with naming(folder / CONFIG, f"this is no {family.kind}'s configuration"):
        family.check(hf)
        return family.read(hf)


def config_to_hf(config: ModelConfig, contents: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the contents of a config.json that transformers reads as the same model.

    contents are entries that our configuration does not have, and are kept: those of the config.json that the model was
    read from (`load_hf`), or single ones such as max_position_embeddings (default 2048 for a LLaMA), bos_token_id and
    eos_token_id (default null). The configuration's own entries override them.

    contents that describe this very model are returned as they are. A LLaMA becomes the first of LLaMA, Mistral,
    Ministral, Qwen2 and Qwen3 that can express it, that of the contents before others: one whose hidden_size is not a
    multiple of its heads is a Mistral without a window to transformers.

    Raises UserError for contents of another kind of model, and for a model that transformers cannot express: a LLaMA
    with biases and norms of q and k, a GPT with rope, fewer key heads or another head width, a TransNormer with another
    decay or epsilon, a Linear Transformer.
    """
    contents = own_part(contents or {})
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


def _describes(contents: Mapping[str, Any], config: ModelConfig) -> bool:
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
