"""Load folders of Hugging Face tokenizers, so that they give the ids of transformers.

A tokenizer.json is only a part of such a tokenizer. transformers (5.24, AutoTokenizer) also reads:

* tokenizer_config.json: the class, its settings, and added tokens with flags of their own;
* special_tokens_map.json and added_tokens.json, if tokenizer_config.json has no
  ``added_tokens_decoder``;
* config.json, whose model_type overrides some classes.

Some classes keep only vocabulary, merges and post-processor of the tokenizer.json, and build the
rest themselves (data/tokenizer/classes.py). Code of a model's repository is never run. A setting
that changes ids but is not supported here is refused by name: training with other ids than the
model's would cause no error.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.tokenizer.added_tokens import (
    FLAGS,
    NAMES,
    add_missing,
    added_token,
    control_tokens,
    listed_tokens,
    named_tokens,
    text_of_token,
    tokens_without_name,
)
from data.tokenizer.classes import BUILDERS, DEFAULTS, class_of
from runtime.errors import DataError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedFolder:
    """A tokenizer as the transformers library would have loaded it from the folder."""

    backend: "Tokenizer"
    special_tokens: dict[str, str]
    """Texts of special tokens, keyed by name, such as eos_token."""
    control: frozenset[str]
    """Added tokens that no text may spell: special ones, ends of texts and turns, and
    ``chat_control_tokens``.
    """
    ends: tuple[int, ...]
    """Ids of end-of-text tokens: eos_token_id in generation_config.json and config.json."""
    settings: dict[str, Any]
    """Settings that change ids, from files next to tokenizer.json: class, flags of added tokens,
    begin and end tokens.
    """


def load_folder(path: Path, content: bytes) -> LoadedFolder:
    """Load a tokenizer.json with this content, and the files next to it.

    Raises DataError, naming the file, if one is not a JSON object or has a setting that is not
    supported here. For a damaged tokenizer.json the tokenizers library raises other exceptions.
    """
    from tokenizers import Tokenizer

    tokenizer = json.loads(content)
    config = tokenizer_config(path)
    model = json_beside(path, "config.json")
    _refuse_unread(path, config)

    class_name = class_of(path, config, model, has_bytes=b'"ByteLevel"' in content)
    if class_name is not None and not _is_bpe(path, class_name, config, tokenizer):
        class_name = None
    if class_name is None:
        backend = Tokenizer.from_buffer(content)
    else:
        config = DEFAULTS[class_name] | config
        backend = _rebuilt(class_name, config, tokenizer)

    entries = {}  # added tokens of tokenizer.json, keyed by id
    for entry in tokenizer.get("added_tokens") or []:
        entries[entry["id"]] = {name: value for name, value in entry.items() if name != "id"}
    tokens_by_id = _listed(path, config, entries)
    special = named_tokens(config, tokens_by_id)
    unnamed_tokens = [added_token(token) for token in tokens_without_name(config)]
    words = backend.get_vocab(with_added_tokens=False)
    add_missing(backend, tokens_by_id, [*special.values(), *unnamed_tokens])

    if class_name == "Qwen2Tokenizer":  # this class adds all special tokens again, without flags
        tokens = (*special.values(), *unnamed_tokens)
        backend.add_tokens([added_token(text_of_token(token)) for token in tokens])
    if class_name == "GPTNeoXTokenizer":  # this class ignores the post-processor in tokenizer.json
        backend.post_processor = None

    texts = {name: text_of_token(token) for name, token in special.items()}
    ends = _end_ids(path, model)
    return LoadedFolder(
        backend=backend,
        special_tokens=texts,
        control=control_tokens(backend, config, texts, entries, words, ends),
        ends=tuple(ends),
        settings=_settings(backend, config, class_name, texts),
    )


def json_beside(path: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Return the JSON object in a file next to the tokenizer; {} if there is no such file.

    Raises DataError if the file cannot be read or is not a JSON object.
    """
    file = Path(path).with_name(name)
    try:
        if not file.is_file():
            return {}
        return dict(json.loads(file.read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is not a JSON object ({error}); repair it or remove it") from error


def tokenizer_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tokenizer_config.json next to a tokenizer.json; {} if there is none.

    As in transformers, entries of special_tokens_map.json override it if it has no
    added_tokens_decoder. Raises DataError like `json_beside`.
    """
    config = json_beside(path, "tokenizer_config.json")
    unnamed_tokens = config.pop("additional_special_tokens", None)
    if unnamed_tokens and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = unnamed_tokens
    if "added_tokens_decoder" in config:
        return config

    for name, value in json_beside(path, "special_tokens_map.json").items():
        is_list = isinstance(value, list)
        if is_list and name in ("additional_special_tokens", "extra_special_tokens"):
            old_tokens = list(config.get("extra_special_tokens") or [])
            new_tokens = [token for token in value if token not in old_tokens]
            config["extra_special_tokens"] = old_tokens + new_tokens
        elif isinstance(value, dict):
            config[name] = value | {"special": True}
        else:
            config[name] = value
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json, keyed by name, such as eos_token."""
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _refuse_unread(path: Path, config: Mapping[str, Any]) -> None:
    """Raise DataError for settings that change ids but are not supported here."""
    config_file = path.with_name("tokenizer_config.json")
    auto_map = config.get("auto_map")
    if isinstance(auto_map, list) or (isinstance(auto_map, dict) and auto_map.get("AutoTokenizer")):
        raise DataError(
            f"{config_file} has auto_map: its tokenizer is custom code, which is not run here; "
            "if its tokenizer.json gives the same ids, remove auto_map"
        )
    for name in ("split_special_tokens", "fix_mistral_regex"):
        if config.get(name):
            raise DataError(
                f"{config_file} has {name}, which is not supported here; save the tokenizer with "
                f"{name} applied, or remove {name}"
            )


def _is_bpe(
    path: Path, class_name: str, config: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> bool:
    """Return whether a tokenizer.json has the merges from which a class builds the tokenizer.

    A custom tokenizer without merges, such as one of words, is used as it is, even if the model's
    usual class is BPE. Raises DataError if tokenizer_config.json names the class nevertheless.
    """
    model = tokenizer["model"]
    if model.get("type", "BPE") == "BPE" and "merges" in model:
        return True
    if str(config.get("tokenizer_class", "")).removesuffix("Fast") == class_name:
        raise DataError(
            f"{path.with_name('tokenizer_config.json')} has tokenizer_class {class_name}, which is "
            f"BPE, but {path} is {model.get('type')}; set tokenizer_class to "
            "PreTrainedTokenizerFast"
        )
    return False


def _rebuilt(
    class_name: str, config: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> "Tokenizer":
    """Build a class's tokenizer from the file's vocabulary, merges and post-processor."""
    from tokenizers import Tokenizer

    model = tokenizer["model"]
    merges = []
    for merge in model["merges"]:
        merges.append(tuple(merge.split(" ") if isinstance(merge, str) else merge))
    backend = BUILDERS[class_name](model["vocab"], merges, config)
    # The post-processor is read from a file without a vocabulary, which may have hundreds of
    # thousands of entries.
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "model": empty, "post_processor": tokenizer.get("post_processor")}
    backend.post_processor = Tokenizer.from_str(json.dumps(shell)).post_processor
    return backend


def _listed(
    path: Path, config: Mapping[str, Any], entries: Mapping[int, Mapping[str, Any]]
) -> dict[int, "AddedToken"]:
    """Return added tokens, keyed by id, from tokenizer_config.json or else from the other files."""
    if "added_tokens_decoder" not in config:
        special = {text for name, text in special_tokens(config).items() if name in NAMES}
        special |= {text_of_token(token) for token in tokens_without_name(config)}
        return listed_tokens(json_beside(path, "added_tokens.json"), special, entries)
    tokens: dict[int, AddedToken] = {}
    try:
        for number, token in config["added_tokens_decoder"].items():
            tokens[int(number)] = added_token(token)
    except (AttributeError, TypeError, ValueError) as error:
        config_file = path.with_name("tokenizer_config.json")
        raise DataError(
            f"{config_file} has an added_tokens_decoder that cannot be read ({error}); repair it"
        ) from error
    return tokens


def _end_ids(path: Path, model: Mapping[str, Any]) -> list[int]:
    """Return the ids of eos_token_id in generation_config.json and config.json.

    The ids of a multimodal model's text part are included.
    """
    configs = [json_beside(path, "generation_config.json"), model]
    if isinstance(text_config := model.get("text_config"), dict):
        configs.append(text_config)
    numbers: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number not in numbers:
                numbers.append(number)
    return numbers


def _settings(
    backend: "Tokenizer",
    config: Mapping[str, Any],
    class_name: str | None,
    special: Mapping[str, str],
) -> dict[str, Any]:
    """Return the settings from which the digest in the record of prepared data is computed.

    Keep their order and keys: they change the digest, and data prepared earlier would be refused.
    """
    settings: dict[str, Any] = {"class": class_name}
    if class_name is not None:
        for name in ("add_prefix_space", "legacy"):
            settings[name] = config.get(name)
    for name in ("bos_token", "eos_token"):
        settings[name] = special.get(name)
    added_tokens = []
    for number, token in sorted(backend.get_added_tokens_decoder().items()):
        added_tokens.append([number, token.content, *(getattr(token, flag) for flag in FLAGS)])
    settings["added"] = added_tokens
    return settings
