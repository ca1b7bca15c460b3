"""Look at prepared data: check every token of a prefix, and show samples as text."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from data.chat.samples import Conversations
from data.errors import DataError
from data.text.indexed import LOSS_MASK, check_indexed
from data.tokenizer import Tokenizer

_GREEN, _PLAIN = "\033[32m", "\033[0m"
_SHOWN = 400
"""Characters of a text's beginning, and as many of its end, that are shown of a long one."""


def check_prefix(prefix: str, tokenizer: Tokenizer) -> str:
    """Read a prefix whole, and return what it holds in one line.

    Raises:
        DataError: whatever would stop training, a document of text without its end, or a loss mask that is not of
            these tokens.
    """
    indexed = check_indexed(prefix, tokenizer.vocab_size, scan_tokens=np.iinfo(np.int64).max)
    indexed.check_tokenizer(tokenizer.path, tokenizer.sha256)
    sizes, ids = f"{indexed.tokens:,} tokens ({indexed.dtype})", indexed.token_ids()
    if not os.path.exists(f"{prefix}{LOSS_MASK}.idx"):
        ends = np.cumsum(indexed.lengths, dtype=np.int64)[np.asarray(indexed.bounds[1:]) - 1] - 1
        if (open_ends := int((ids[ends] != tokenizer.eod).sum())) > 0:
            raise DataError(
                f"{prefix}.bin holds {open_ends} documents that do not end with the tokenizer's end-of-document token, "
                f"{tokenizer.eod}; prepare the text with this tokenizer"
            )
        return f"{prefix}: {len(indexed.bounds) - 1:,} documents, {sizes}"
    mask = check_indexed(prefix + LOSS_MASK, 2, scan_tokens=np.iinfo(np.int64).max).token_ids()
    conversations = Conversations(prefix, tokenizer.vocab_size, np.iinfo(np.int64).max, check=True)
    longest, samples = conversations.longest, len(conversations)
    return (
        f"{prefix}: {len(indexed.lengths):,} conversations, {sizes}, packed into {samples:,} samples of up to "
        f"{longest:,} tokens, {1 - indexed.tokens / samples / longest:.2%} padding at that length; "
        f"{int(mask.sum(dtype=np.int64)):,} tokens carry loss"
    )


def shown(prefix: str, tokenizer: Tokenizer, count: int, whole: bool, colour: bool) -> Iterator[str]:
    """Yield the first documents of a prefix as text, or samples of conversations, each with its boundaries.

    Tokens that carry loss are green, or between ⟦ and ⟧ where there is no `colour`.

    Args:
        whole: show all of each text, not its beginning and end alone.
    """
    indexed = check_indexed(prefix, tokenizer.vocab_size)
    learned = None
    if os.path.exists(f"{prefix}{LOSS_MASK}.idx"):
        learned = check_indexed(prefix + LOSS_MASK, 2).token_ids()
    at, ids = 0, indexed.token_ids()
    for number, (first, last) in enumerate(pairwise(indexed.bounds[: count + 1].tolist())):
        lengths = indexed.lengths[first:last].tolist()
        yield f"=== {'document' if learned is None else 'sample'} {number}: {sum(lengths):,} tokens"
        for place, length in enumerate(lengths):
            if learned is not None:
                yield f"--- conversation {place + 1} of {len(lengths)}: {length:,} tokens"
            mask = np.zeros(length, bool) if learned is None else learned[at : at + length] > 0
            cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), length]
            parts = [
                (tokenizer.detokenize(ids[at + a : at + b].tolist(), special=True), bool(mask[a]))
                for a, b in pairwise(cuts)
            ]
            yield _painted(parts if whole else _abridged(parts), colour)
            at += length


def _abridged(parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Keep the beginning and the end of a text in parts, and tell how much is left out between them."""
    size = sum(len(text) for text, _ in parts)
    if size <= 2 * _SHOWN + 100:
        return list(parts)
    begin, end, at = list[tuple[str, bool]](), list[tuple[str, bool]](), 0
    for text, learned in parts:
        if at < _SHOWN:
            begin.append((text[: _SHOWN - at], learned))
        if at + len(text) > size - _SHOWN:
            end.append((text[max(0, size - _SHOWN - at) :], learned))
        at += len(text)
    left_out = f"\n... {size - 2 * _SHOWN:,} of {size:,} characters left out, which --whole shows ...\n"
    return [*begin, (left_out, False), *end]


def _painted(parts: Sequence[tuple[str, bool]], colour: bool) -> str:
    begin, end = (_GREEN, _PLAIN) if colour else ("⟦", "⟧")
    return "".join(f"{begin}{text}{end}" if learned else text for text, learned in parts)
