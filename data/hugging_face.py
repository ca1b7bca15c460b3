"""Folders of Hugging Face tokenizers, loaded so that they give the ids of transformers.

A tokenizer.json is only a part of such a tokenizer. transformers (5.24, AutoTokenizer) also reads:

* tokenizer_config.json: the class, its settings, and added tokens with flags of their own;
* special_tokens_map.json and added_tokens.json, if that one has no ``added_tokens_decoder``;
* config.json, whose model_type overrides some classes.

Some classes keep only vocabulary, merges and post-processor of the tokenizer.json, and build the
rest themselves (data/tokenizer_classes.py). Code of a model's repository is never run.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.tokenizer_classes import BUILDERS, DEFAULTS, class_of
from runtime.errors import DataError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer may name, in the order in which they are added."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, kw_only=True)
class LoadedFolder:
    """A tokenizer as transformers has it after loading."""

    backend: "Tokenizer"
    named: dict[str, str]
    """Texts of special tokens by name, such as eos_token."""
    control: frozenset[str]
    """Added tokens that no text may spell: special ones, ends of texts and turns, and
    ``chat_control_tokens``.
    """
    ends: tuple[int, ...]
    """Ids of eos_token_id in generation_config.json and config.json."""
    settings: dict[str, Any]
    """Settings of ids from the files beside tokenizer.json: class, flags of added tokens, begin and
    end tokens.
    """


def load_folder(path: Path, content: bytes) -> LoadedFolder:
    """Load a tokenizer.json, of which this is the content, with the files beside it.

    Raises DataError: a file is no JSON object, or asks for what is not done here, by its field.
    Other exceptions are the tokenizers library's for a damaged tokenizer.json.
    """
    from tokenizers import Tokenizer

    whole = json.loads(content)
    config = tokenizer_config(path)
    model = json_beside(path, "config.json")
    _refuse_unread(path, config, model)

    class_name = class_of(path, config, model, has_bytes=b'"ByteLevel"' in content)
    if class_name is not None and not _is_bpe(path, class_name, config, whole):
        class_name = None
    if class_name is None:
        backend = Tokenizer.from_buffer(content)
    else:
        config = DEFAULTS[class_name] | config
        backend = _rebuilt(class_name, config, whole)

    in_file = _tokens_in_file(whole)
    decoder = _decoder(path, config, in_file)
    tokens = _named_tokens(config, decoder)
    extra = [_added(token) for token in _extra(config)]
    words = backend.get_vocab(with_added_tokens=False)
    _add(backend, decoder, [*tokens.values(), *extra])

    if class_name == "Qwen2Tokenizer":  # it adds all of them again, without their flags
        backend.add_tokens([_added(_text(token)) for token in (*tokens.values(), *extra)])
    if class_name == "GPTNeoXTokenizer":  # it drops what the tokenizer.json adds
        backend.post_processor = None

    named = {name: _text(token) for name, token in tokens.items()}
    ends = _end_ids(path, model)
    return LoadedFolder(
        backend=backend,
        named=named,
        control=_control(backend, config, named, in_file, words, ends),
        ends=tuple(ends),
        settings={
            "class": class_name,
            **{
                name: config.get(name)
                for name in ("add_prefix_space", "legacy")
                if class_name is not None
            },
            **{name: named.get(name) for name in ("bos_token", "eos_token")},
            "added": [
                [number, token.content, *(getattr(token, flag) for flag in _FLAGS)]
                for number, token in sorted(backend.get_added_tokens_decoder().items())
            ],
        },
    )


def json_beside(path: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Return the JSON object of a file beside the tokenizer, {} if there is none. Raises DataError."""
    file = Path(path).with_name(name)
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")).items()) if file.is_file() else {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is not a JSON object ({error}); repair it or remove it") from error


def tokenizer_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tokenizer_config.json beside a tokenizer.json, {} if there is none. Raises
    DataError.

    As in transformers, special_tokens_map.json has the last word if the configuration has no
    added_tokens_decoder.
    """
    config = json_beside(path, "tokenizer_config.json")
    extra = config.pop("additional_special_tokens", None)
    if extra and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = extra
    if "added_tokens_decoder" in config:
        return config

    for name, value in json_beside(path, "special_tokens_map.json").items():
        if name in ("additional_special_tokens", "extra_special_tokens") and isinstance(
            value, list
        ):
            listed = list(config.get("extra_special_tokens") or [])
            config["extra_special_tokens"] = listed + [
                token for token in value if token not in listed
            ]
        else:
            config[name] = value | {"special": True} if isinstance(value, dict) else value
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names, such as eos_token."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
    }
    return {
        name: text
        for name, text in texts.items()
        if name.endswith("_token") and isinstance(text, str)
    }


def make_special(backend: "Tokenizer", tokens: Iterable["AddedToken"]) -> None:
    """Make added tokens special, whatever flag their entries have."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=True,
            )
            for token in tokens
            if not token.special
        ]
    )


def unknown_id(backend: "Tokenizer", content: bytes) -> int | None:
    """Return the id of what the vocabulary has no token for, None if there is none of its own."""
    if type(backend.model).__name__ == "Unigram":
        unknown: int | None = json.loads(content)["model"].get("unk_id")
        return unknown
    return backend.token_to_id(getattr(backend.model, "unk_token", None) or "")


def backend_with_unknown(backend: "Tokenizer") -> "Tokenizer | None":
    """Return a copy that has a token for what this backend drops; None if it drops nothing.

    A BPE drops what it has neither a piece, nor bytes, nor an unknown token for.
    """
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import ByteLevel

    model = backend.model
    words = backend.get_vocab(with_added_tokens=False)
    if type(model).__name__ != "BPE" or model.unk_token in words:
        return None
    alphabet = ByteLevel.alphabet()
    if model.byte_fallback:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    if all(entry in words for entry in alphabet):
        return None
    copy = Tokenizer.from_str(backend.to_str())
    copy.model.unk_token = next(iter(words))
    copy.model.fuse_unk = False
    return copy


def _refuse_unread(path: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise DataError for settings that change ids and are not followed here."""
    beside = path.with_name("tokenizer_config.json")
    auto_map = config.get("auto_map")
    if isinstance(auto_map, list) or (isinstance(auto_map, dict) and auto_map.get("AutoTokenizer")):
        raise DataError(
            f"{beside} has auto_map, a tokenizer in code of its own, which is not run here; if its tokenizer.json "
            "gives the same ids, remove auto_map"
        )
    for name in ("split_special_tokens", "fix_mistral_regex"):
        if config.get(name):
            raise DataError(
                f"{beside} has {name}, which is not followed here; save the tokenizer with it applied, or remove it"
            )


def _is_bpe(
    path: Path, class_name: str, config: Mapping[str, Any], whole: Mapping[str, Any]
) -> bool:
    """Return whether a tokenizer.json has the merges that a class builds itself from.

    A tokenizer of somebody's own, such as one of words, beside a model whose usual class is BPE, is
    its tokenizer.json. Raises DataError: the configuration names the class for it.
    """
    model = whole["model"]
    if model.get("type", "BPE") == "BPE" and "merges" in model:
        return True
    if str(config.get("tokenizer_class", "")).removesuffix("Fast") == class_name:
        raise DataError(
            f"{path.with_name('tokenizer_config.json')} has tokenizer_class {class_name}, which is BPE, and {path} is "
            f"{model.get('type')}; set tokenizer_class to PreTrainedTokenizerFast"
        )
    return False


def _rebuilt(class_name: str, config: Mapping[str, Any], whole: Mapping[str, Any]) -> "Tokenizer":
    """Build the tokenizer of a class that takes only vocabulary, merges and post-processor from the
    file.
    """
    from tokenizers import Tokenizer

    model = whole["model"]
    merges = [
        tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]
    ]
    backend = BUILDERS[class_name](model["vocab"], merges, config)
    # The post-processor alone: a vocabulary of hundreds of thousands need not be read again for it.
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "model": empty, "post_processor": whole.get("post_processor")}
    backend.post_processor = Tokenizer.from_str(json.dumps(shell)).post_processor
    return backend


def _tokens_in_file(whole: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the added tokens of a tokenizer.json by id."""
    added = whole.get("added_tokens") or []
    return {
        token["id"]: {name: value for name, value in token.items() if name != "id"}
        for token in added
    }


def _decoder(
    path: Path, config: Mapping[str, Any], in_file: Mapping[int, Any]
) -> dict[int, "AddedToken"]:
    """Return added tokens by id: those of tokenizer_config.json, or else of all the other files."""
    from tokenizers import AddedToken

    beside = path.with_name("tokenizer_config.json")
    if "added_tokens_decoder" in config:
        try:
            return {
                int(number): _added(token)
                for number, token in config["added_tokens_decoder"].items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(
                f"{beside} has an added_tokens_decoder that is none ({error}); repair it"
            ) from error

    named = {text for name, text in special_tokens(config).items() if name in NAMES}
    named |= {_text(token) for token in _extra(config)}
    decoder: dict[int, AddedToken] = {}
    for text, number in json_beside(path, "added_tokens.json").items():
        special = text in named
        decoder[number] = AddedToken(text, normalized=not special, special=special)
    decoder.update({number: AddedToken(**token) for number, token in in_file.items()})
    return decoder


def _named_tokens(
    config: Mapping[str, Any], decoder: Mapping[int, "AddedToken"]
) -> dict[str, "AddedToken | str"]:
    """Return the special tokens with a name, in the order in which transformers adds them."""
    listed = {_text(token): token for token in decoder.values()}
    more = config.get("extra_special_tokens")
    values = dict(config) | (more if isinstance(more, dict) else {})
    others = [name for name in values if name.endswith("_token") and name not in NAMES]

    tokens: dict[str, AddedToken | str] = {}
    for name in (*NAMES, *others):
        value = values.get(name)
        if isinstance(value, dict):
            value = _added(value)
        if value is None or isinstance(value, bool | int | float | list):
            continue
        tokens[name] = listed.get(_text(value), value) if name in NAMES else value
    return tokens


def _extra(config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name."""
    extra = config.get("extra_special_tokens")
    return list(extra) if isinstance(extra, list | tuple) else []


def _added(token: Any) -> "AddedToken":
    """Return a token of a configuration with its flags; a text alone is a special one. Raises
    TypeError.
    """
    from tokenizers import AddedToken

    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(token["content"], **{name: token[name] for name in _FLAGS if name in token})


def _text(token: Any) -> str:
    return (
        token["content"]
        if isinstance(token, dict)
        else token
        if isinstance(token, str)
        else token.content
    )


def _add(
    backend: "Tokenizer", decoder: Mapping[int, "AddedToken"], named: Iterable["AddedToken | str"]
) -> None:
    """Add what the backend lacks, in transformers' order: the order gives new tokens their ids.

    Tokens of ``decoder`` with other flags than the backend's replace those; named ones are only
    added if missing.
    """
    named = list(named)
    texts_of_named = set(map(_text, named))
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    tokens = [token for _, token in sorted(decoder.items()) if repr(token) not in present]
    texts = {token.content for token in backend.get_added_tokens_decoder().values()} | set(
        map(_text, tokens)
    )
    for token in named:
        if _text(token) not in texts:
            texts.add(_text(token))
            tokens.append(_added(token))
    for token in tokens:
        token.special = token.special or token.content in texts_of_named
    backend.add_tokens(tokens)


def _end_ids(path: Path, model: Mapping[str, Any]) -> list[int]:
    """Return the ids of eos_token_id in generation_config.json and config.json, a multimodal
    model's text part too.
    """
    text = model.get("text_config")
    parts = [
        json_beside(path, "generation_config.json"),
        model,
        text if isinstance(text, dict) else {},
    ]
    numbers = list[int]()
    for part in parts:
        value = part.get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        numbers += [
            number for number in listed if isinstance(number, int) and number not in numbers
        ]
    return numbers


def _control(
    backend: "Tokenizer",
    config: Mapping[str, Any],
    named: Mapping[str, str],
    in_file: Mapping[int, Mapping[str, Any]],
    words: Mapping[str, int],
    ends: Iterable[int],
) -> frozenset[str]:
    """Return the texts of added tokens that no text may become.

    A pad token (or another name) that is only an ordinary word of the vocabulary, such as "!", is
    not among them.
    """
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = [*in_file.values(), *(config.get("added_tokens_decoder") or {}).values()]
    in_files = {token["content"] for token in listed}

    texts = {token["content"] for token in listed if token.get("special")}
    texts |= {
        text
        for text, token in added.items()
        if token.special and (text in in_files or text not in words)
    }
    texts |= {named[name] for name in ("bos_token", "eos_token") if name in named}
    texts |= {text for text in map(backend.id_to_token, ends) if text is not None}
    texts |= set(config.get("chat_control_tokens") or [])
    return frozenset(texts & set(added))
