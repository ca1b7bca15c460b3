"""Begin tokens of prepared documents: what their records say, and which files go together."""

from collections.abc import Sequence
from typing import Any

from data.text.indexed import prepared_record
from data.tokenizer import Tokenizer
from runtime.errors import DataError


def recorded_begin(prefix: str) -> tuple[int, ...] | None:
    """Return the ids that begin each document of a prefix, None if no record of ours says so."""
    prepared = _prepared(prefix)
    if prepared is None or prepared.get("begin") is None:
        return None
    return tuple(map(int, prepared["begin"]))


def check_begins(prefixes: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """Return a note on documents of an older version, which lack what the tokenizer puts first.

    Raises DataError: some documents begin in one way, and some in another.
    """
    records = {prefix: record for prefix in prefixes if (record := _prepared(prefix)) is not None}
    if not records:
        return None
    begins = {prefix: recorded_begin(prefix) or () for prefix in records}
    first, begin = next(iter(begins.items()))
    for prefix, other in begins.items():
        if other != begin:
            raise DataError(
                f"data_path names {first}, whose documents begin with {_named(begin, tokenizer)}, and {prefix}, whose "
                f"begin with {_named(other, tokenizer)}; prepare one of them again (--add-bos-token, --overwrite)"
            )
    if "begin" in records[first] or not tokenizer.before:
        return None
    return (
        f"note: documents of {first} were prepared by a version that did not begin them with "
        f"{_named(tokenizer.before, tokenizer)}, as {tokenizer.path} does by itself; python -m tools.prepare_data "
        "--overwrite writes them so"
    )


def _prepared(prefix: str) -> dict[str, Any] | None:
    """Return what the record beside a prefix says of documents of text, None if there is none."""
    prepared = prepared_record(prefix)
    return prepared if prepared.get("conversations", "unknown") is None else None


def _named(begin: Sequence[int], tokenizer: Tokenizer) -> str:
    return ", ".join(map(tokenizer.name_of, begin)) or "no token"
