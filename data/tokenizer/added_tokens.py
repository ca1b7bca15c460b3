"""Added tokens of Hugging Face tokenizers: flags, order, and which of them no text may spell.

New tokens get their ids in the order in which they are added, so this order is exactly that of the
transformers library: first the tokens that the files list by id, then the special tokens with a
name, in the order of NAMES, then those without a name.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer may name, in the order in which they are added."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Flags of an added token, named as in tokenizers.AddedToken."""


def added_token(token: Any) -> "AddedToken":
    """Return a token of a configuration with its flags; a plain string is a special token.

    Raises TypeError if the token is neither a string nor an object.
    """
    from tokenizers import AddedToken

    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(token["content"], **{name: token[name] for name in FLAGS if name in token})


def text_of_token(token: Any) -> str:
    """Return the text of a token of a configuration: an object, a text or an AddedToken."""
    if isinstance(token, dict):
        return token["content"]
    return token if isinstance(token, str) else token.content


def listed_tokens(
    numbers: Mapping[str, int], special: set[str], entries: Mapping[int, Mapping[str, Any]]
) -> dict[int, "AddedToken"]:
    """Merge the added tokens of added_tokens.json and tokenizer.json; return them keyed by id.

    Args:
        numbers: ids in added_tokens.json, keyed by text.
        special: texts of special tokens.
        entries: flags in tokenizer.json, keyed by id; they override ``numbers``.
    """
    from tokenizers import AddedToken

    tokens: dict[int, AddedToken] = {}
    for text, number in numbers.items():
        is_special = text in special
        tokens[number] = AddedToken(text, normalized=not is_special, special=is_special)
    for number, entry in entries.items():
        tokens[number] = AddedToken(**entry)
    return tokens


def named_tokens(
    config: Mapping[str, Any], tokens_by_id: Mapping[int, "AddedToken"]
) -> dict[str, "AddedToken | str"]:
    """Return the special tokens that have a name, keyed by name, in transformers' order."""
    by_text = {text_of_token(token): token for token in tokens_by_id.values()}
    values = dict(config)
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        values |= extra
    other_names = [name for name in values if name.endswith("_token") and name not in NAMES]

    tokens: dict[str, AddedToken | str] = {}
    for name in (*NAMES, *other_names):
        value = values.get(name)
        if isinstance(value, dict):
            value = added_token(value)
        if value is None or isinstance(value, bool | int | float | list):
            continue
        tokens[name] = by_text.get(text_of_token(value), value) if name in NAMES else value
    return tokens


def tokens_without_name(config: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name, as the configuration has them."""
    extra = config.get("extra_special_tokens")
    return list(extra) if isinstance(extra, list | tuple) else []


def add_missing(
    backend: "Tokenizer",
    tokens_by_id: Mapping[int, "AddedToken"],
    special_tokens: Iterable["AddedToken | str"],
) -> None:
    """Add the tokens that the backend lacks, in transformers' order.

    A token of ``tokens_by_id`` replaces the backend's if their flags differ; special tokens are
    added only if missing.
    """
    present_tokens = backend.get_added_tokens_decoder().values()
    unchanged = {repr(token) for token in present_tokens}
    tokens = [token for _, token in sorted(tokens_by_id.items()) if repr(token) not in unchanged]
    texts = {token.content for token in present_tokens} | {token.content for token in tokens}
    special_texts = set()
    for token in special_tokens:
        text = text_of_token(token)
        special_texts.add(text)
        if text not in texts:
            texts.add(text)
            tokens.append(added_token(token))
    for new_token in tokens:
        new_token.special = new_token.special or new_token.content in special_texts
    backend.add_tokens(tokens)


def make_special(backend: "Tokenizer", tokens: Iterable["AddedToken"]) -> None:
    """Make added tokens special, whatever flag their entries have."""
    from tokenizers import AddedToken

    changed = []
    for token in tokens:
        if token.special:
            continue
        flags = {flag: getattr(token, flag) for flag in FLAGS}
        changed.append(AddedToken(token.content, **(flags | {"special": True})))
    backend.add_tokens(changed)


def control_tokens(
    backend: "Tokenizer",
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    entries: Mapping[int, Mapping[str, Any]],
    words: Mapping[str, int],
    ends: Iterable[int],
) -> frozenset[str]:
    """Return the texts of the added tokens that no text of a document may become.

    A pad token (or another named one) that is only an ordinary word of the vocabulary, such as "!",
    is not among them.
    """
    added_tokens = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    file_tokens = [*entries.values(), *(config.get("added_tokens_decoder") or {}).values()]
    file_texts = {token["content"] for token in file_tokens}

    texts = {token["content"] for token in file_tokens if token.get("special")}
    for text, token in added_tokens.items():
        if token.special and (text in file_texts or text not in words):
            texts.add(text)
    texts.update(
        special_tokens[name] for name in ("bos_token", "eos_token") if name in special_tokens
    )
    texts.update(text for text in map(backend.id_to_token, ends) if text is not None)
    texts.update(config.get("chat_control_tokens") or [])
    return frozenset(texts & set(added_tokens))


def unknown_id(backend: "Tokenizer", content: bytes) -> int | None:
    """Return the id of the unknown token; None if the vocabulary has none."""
    if type(backend.model).__name__ == "Unigram":
        unknown: int | None = json.loads(content)["model"].get("unk_id")
        return unknown
    return backend.token_to_id(getattr(backend.model, "unk_token", None) or "")


def backend_with_unknown(backend: "Tokenizer") -> "Tokenizer | None":
    """Return a copy that writes a token for each dropped character; None if none is dropped.

    A BPE tokenizer drops characters for which it has no piece, no bytes and no unknown token.
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
