"""Convert conversations to packed token ids and loss masks. A sequence has S tokens.

A conversation never crosses the end of a sequence: one that is too long is refused, or cut as the
user chooses. Each conversation is counted by its outcome, so that a summary accounts for every row
that was read.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from data.chat.keys import Reads
from data.chat.rows import Conversation, conversation_of
from data.chat.template import ChatTemplate, UnboundedError
from data.text.corpus import Row
from data.text.indexed import write_index
from data.text.packing import best_fit_decreasing, by_bin
from data.text.workers import Tokens, joined
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError

UNREAD = "unread: "
"""Prefix of the keys that count ignored or changed content, such as a field that nothing reads."""
END = "end: "
"""Prefix of the keys that count turn-end tokens; the token's id follows."""
TURNS = "turns"
"""Key of the counter of learned turns (turns that carry loss)."""
Piece = tuple[np.ndarray, np.ndarray]
"""Token ids and loss mask of a conversation or a part of it, [T] each."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Settings that determine how conversations are prepared."""

    seq_length: int
    """S, the maximum number of tokens of a conversation and of a packed sample."""
    chat_template: str | None = None
    """File or name of the chat template; None uses the tokenizer's."""
    too_long: Literal["error", "split", "truncate-left", "truncate-right"] = "error"
    """Treatment of a conversation of more than S tokens."""
    skip_refused: bool = False
    """List conversations that cannot be used and continue, instead of stopping."""
    strict: bool = False
    """Refuse a conversation with a key that nothing reads, instead of counting it."""

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise DataError(
                f"seq_length is {self.seq_length}; it must be 2 or more, since a sequence's first "
                "token is never predicted"
            )


def with_conversation(reads: Reads, row: Row) -> Row:
    """Replace a row's content by its conversation, or by a DataError if it has no usable one.

    Do this before sending rows to other processes: pickle fails on values that are nested deeply.

    Args:
        reads: the names that the template uses.
        row: the row's file and line, and its content.
    """
    where, content = row
    try:
        return where, conversation_of(content, reads)
    except DataError as error:
        return where, error
    except RecursionError:
        return where, DataError("is nested too deeply; flatten its values")


def convert(
    chat: Chat, template: ChatTemplate, tokenizer: HuggingFaceTokenizer, batch: Sequence[Row]
) -> Tokens:
    """Tokenize conversations, cut those that are too long, and count them by outcome.

    The rows come from `with_conversation`. The counts also contain, with the prefix UNREAD, the
    keys that nothing reads and, with the prefix END, the ids of the tokens that end turns.

    Raises DataError, with the file and line, if a conversation cannot be used, unless
    `chat.skip_refused`. An UnboundedError is never skipped.
    """
    pieces: list[Piece] = []
    refused: list[str] = []
    counts = Counter(read=len(batch))
    for where, row in batch:
        try:
            if isinstance(row, DataError):
                raise row
            pieces += _converted(chat, template, tokenizer, row, counts)
        except DataError as error:
            if not chat.skip_refused or isinstance(error, UnboundedError):
                raise DataError(f"{where}: {error}") from error
            refused.append(f"{where}: {error}")

    counts["refused"] = len(refused)
    ids, lengths = joined(tokenizer, [piece_ids for piece_ids, _ in pieces])
    masks = np.concatenate([np.zeros(0, bool), *(mask for _, mask in pieces)])
    return Tokens(
        ids=ids,
        lengths=lengths,
        learned=masks.astype(np.uint8),
        counts=counts,
        refused=refused,
    )


def _converted(
    chat: Chat,
    template: ChatTemplate,
    tokenizer: HuggingFaceTokenizer,
    conversation: Conversation,
    counts: Counter[str],
) -> list[Piece]:
    """Return the pieces of a conversation that carry loss, and add to the counts.

    Raises DataError if the conversation cannot be used; the counts are then unchanged.
    """
    encoded = template.encode(tokenizer, conversation)
    if chat.strict and encoded.notes:
        raise DataError(f"has {', '.join(encoded.notes)}; remove this, or leave out --strict")
    pieces = _pieces(encoded.ids, encoded.learned, chat)

    outcome = "kept"
    if len(encoded.ids) > chat.seq_length:
        outcome = "split" if chat.too_long == "split" else "truncated"
    with_loss = [(ids, mask) for ids, mask in pieces if mask.any()]
    counts.update(f"{UNREAD}{note}" for note in encoded.notes)
    counts.update(f"{END}{token}" for token in encoded.ends)
    counts[TURNS] += sum(conversation.learned)
    counts[outcome] += 1
    counts["left_out"] += len(pieces) - len(with_loss)
    counts["learned"] += sum(int(mask.sum()) for _, mask in with_loss)
    return with_loss


def _pieces(ids: np.ndarray, learned: np.ndarray, chat: Chat) -> list[Piece]:
    """Cut a conversation [T] into pieces of at most S tokens.

    A piece's first token is never predicted, so neighbouring pieces of a split share one token: it
    ends one piece, where it is predicted, and begins the next as context. Every other token is in
    one piece, so each is predicted exactly once.

    Raises DataError if the conversation must not be cut, or if no remaining token carries loss.
    """
    size = chat.seq_length
    starts = [0]
    if len(ids) > size:
        if chat.too_long == "error":
            raise DataError(
                f"has {len(ids):,} tokens, but seq_length is {size:,}; give a longer --seq-length, "
                "or --too-long split, truncate-left or truncate-right"
            )
        if chat.too_long == "split":
            starts = list(range(0, len(ids) - 1, size - 1))
        elif chat.too_long == "truncate-left":
            starts = [len(ids) - size]

    pieces = []
    for start in starts:
        mask = learned[start : start + size].copy()
        mask[0] = False
        pieces.append((ids[start : start + size], mask))
    if not any(mask.any() for _, mask in pieces):
        raise DataError(
            "no remaining token carries loss; leave the conversation out or, if it was cut, choose "
            "another --too-long"
        )
    return pieces


def write_packed(
    sources: Sequence[tuple[Path | IO[bytes], np.dtype]],
    pairs: Sequence[tuple[Path, Path]],
    lengths: np.ndarray,
    capacity: int,
) -> int:
    """Write .bin/.idx pairs of packed items; return the number of bins.

    In each pair, an item is a sequence and a bin is a document. Bins are written in random order.

    Args:
        sources: for each pair, the file with the items' concatenated values, and their dtype.
        pairs: the files to write.
        lengths: number of values of each item, int32, each in [1, capacity].
        capacity: maximum number of values in a bin.
    """
    bins = best_fit_decreasing(lengths, capacity)
    # Packing returns bins sorted by length, but training takes the validation split from the end,
    # which should be a sample of all lengths. So shuffle the bins.
    order = np.random.default_rng(0).permutation(int(bins.max()) + 1)
    items, bounds = by_bin(np.argsort(order)[bins])
    ends = np.cumsum(lengths, dtype=np.int64)
    for (source, dtype), (data, index) in zip(sources, pairs, strict=True):
        values = np.memmap(source, dtype=dtype, mode="r")
        with data.open("wb") as file:
            for item in items:
                file.write(values[ends[item] - lengths[item] : ends[item]].tobytes())
        write_index(index, dtype, lengths[items], bounds)
    return len(order)
