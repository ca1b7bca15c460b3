"""Compare the begin tokens of prepared documents with each other and with the tokenizer's."""

from collections.abc import Sequence
from typing import Any

from data.text.indexed import prepared_record
from data.tokenizer import Tokenizer
from runtime.errors import DataError


def recorded_begin(prefix: str) -> tuple[int, ...] | None:
    """Return the token ids that begin each document of a prefix; None if no record has them."""
    prepared = _prepared(prefix)
    if prepared is None or prepared.get("begin") is None:
        return None
    return tuple(map(int, prepared["begin"]))


def check_begins(prefixes: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """Return a note if an older version prepared documents without the tokenizer's begin tokens.

    Raises DataError if the documents of two prefixes begin with different tokens.
    """
    records: dict[str, dict[str, Any]] = {}
    for prefix in prefixes:
        record = _prepared(prefix)
        if record is not None:
            records[prefix] = record
    if not records:
        return None

    first = next(iter(records))
    begin = recorded_begin(first) or ()
    for prefix in records:
        other = recorded_begin(prefix) or ()
        if other != begin:
            raise DataError(
                f"documents of {first} in data_path begin with {_named(begin, tokenizer)}, but "
                f"documents of {prefix} begin with {_named(other, tokenizer)}; prepare one of the "
                "two again (--add-bos-token, --overwrite)"
            )
    if "begin" in records[first] or not tokenizer.before:
        return None
    return (
        f"note: an older version of Longmesh prepared the documents of {first} without "
        f"{_named(tokenizer.before, tokenizer)}, which {tokenizer.path} puts first by itself; to "
        "add it, prepare them again with python -m tools.prepare_data --overwrite"
    )


def _prepared(prefix: str) -> dict[str, Any] | None:
    """Return a prefix's record if it holds text documents; None for conversations or no record."""
    prepared = prepared_record(prefix)
    return prepared if prepared.get("conversations", "unknown") is None else None


def _named(begin: Sequence[int], tokenizer: Tokenizer) -> str:
    return ", ".join(map(tokenizer.name_of, begin)) or "no token"
