"""Conversations to token ids and a loss mask, each within one sequence, and packed. S tokens of a
sequence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from data.chat.keys import Reads
from data.chat.rows import conversation_of
from data.chat.template import ChatTemplate, UnboundedError
from data.text.corpus import Row
from data.text.indexed import write_index
from data.text.packing import best_fit_decreasing, by_bin
from data.text.workers import Tokens, joined
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError

UNREAD, END, TURNS = "unread: ", "end: ", "turns"
"""Begin the names of counts: of what is lost or changed, such as a key that nothing reads; of a
token that ends turns; and of learned turns."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """The settings that determine prepared conversations."""

    seq_length: int
    """S, the most tokens of a conversation, and of a packed sample."""
    chat_template: str | None = None
    """File of the template; None takes the tokenizer's."""
    too_long: Literal["error", "split", "truncate-left", "truncate-right"] = "error"
    """Treatment of a conversation of more than S tokens."""
    skip_refused: bool = False
    """List what cannot be used and go on, instead of stopping."""
    strict: bool = False
    """Refuse a conversation with a key that nothing reads, instead of counting it."""

    def __post_init__(self) -> None:
        if self.seq_length < 2:
            raise DataError(
                f"seq_length is {self.seq_length}; a sequence that teaches anything has 2 tokens or more"
            )


def with_conversation(reads: Reads, row: Row) -> Row:
    """Return a row's conversation, or its error, in its place: nested values may be too deep for
    another process.

    Args:
        reads: the names that the template uses.
    """
    where, content = row
    try:
        return where, conversation_of(content, reads)
    except DataError as error:
        return where, error
    except RecursionError:
        return where, DataError("is nested too deeply; repair it")


def convert(
    chat: Chat, template: ChatTemplate, tokenizer: HuggingFaceTokenizer, batch: Sequence[Row]
) -> Tokens:
    """Tokenize conversations, cut what is too long, and count what became of each.

    The rows are those of `with_conversation`. Counts have the keys that nothing reads, after
    UNREAD, and the ids of the tokens that end turns, after END.

    Raises DataError: a conversation that cannot be used, with file and line, unless these are
    skipped.
    """
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    refused: list[str] = []
    counts = Counter(read=len(batch))
    for where, row in batch:
        try:
            if isinstance(row, DataError):
                raise row
            encoded = template.encode(tokenizer, row)
            if chat.strict and encoded.told:
                raise DataError(
                    f"has {', and '.join(encoded.told)}; remove it, or leave out --strict"
                )
            parts = _pieces(encoded.ids, encoded.learned, chat)
        except DataError as error:
            if not chat.skip_refused or isinstance(error, UnboundedError):
                raise DataError(f"{where}: {error}") from error
            refused.append(f"{where}: {error}")
            continue
        counts.update(f"{UNREAD}{key}" for key in encoded.told)
        counts.update(f"{END}{token}" for token in encoded.ends)
        counts[TURNS] += sum(row.learned)
        fits = len(encoded.ids) <= chat.seq_length
        done = "kept" if fits else "split" if chat.too_long == "split" else "truncated"
        with_loss = [(part, mask) for part, mask in parts if mask.any()]
        counts.update({done: 1, "left_out": len(parts) - len(with_loss)})
        counts["learned"] += sum(int(mask.sum()) for _, mask in with_loss)
        pieces += with_loss
    counts["refused"] = len(refused)
    masks = np.concatenate([np.zeros(0, bool), *(mask for _, mask in pieces)])
    joined_ids, lengths = joined(tokenizer, [part for part, _ in pieces])
    return Tokens(
        ids=joined_ids,
        lengths=lengths,
        learned=masks.astype(np.uint8),
        counts=counts,
        refused=refused,
    )


def _pieces(
    ids: np.ndarray, learned: np.ndarray, chat: Chat
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut a conversation [T] into pieces of at most S tokens. Raises DataError if it must not be,
    or teaches nothing.

    A piece's first token is never predicted, so pieces of a split share one token: each is
    predicted once.
    """
    size, starts = chat.seq_length, [0]
    if len(ids) > size and chat.too_long == "error":
        raise DataError(
            f"has {len(ids):,} tokens, and seq_length is {size:,}; give a longer --seq-length, or --too-long split, "
            "truncate-left or truncate-right"
        )
    if len(ids) > size and chat.too_long == "split":
        starts = list(range(0, len(ids) - 1, size - 1))
    if len(ids) > size and chat.too_long == "truncate-left":
        starts = [len(ids) - size]
    pieces = [(ids[start : start + size], learned[start : start + size].copy()) for start in starts]
    for _, mask in pieces:
        mask[0] = False
    if not any(mask.any() for _, mask in pieces):
        raise DataError(
            "nothing that is left of it carries loss; leave it out, or cut it another way: --too-long"
        )
    return pieces


def write_packed(
    sources: Sequence[tuple[Path | IO[bytes], np.dtype]],
    pairs: Sequence[tuple[Path, Path]],
    lengths: np.ndarray,
    capacity: int,
) -> int:
    """Write .bin/.idx pairs of packed items, in which an item is a sequence and a bin, in a random
    order, a document.

    Returns the number of bins.

    Args:
        sources: for each pair, the file of the items' values, one after the other, and their dtype.
        pairs: the files to write.
        lengths: values of each item, int32, each in [1, capacity].
    """
    bins = best_fit_decreasing(lengths, capacity)
    # Packed by length, and training takes the validation split from the end: that is to be a sample
    # of all.
    drawn = np.random.default_rng(0).permutation(int(bins.max()) + 1)
    items, bounds = by_bin(np.argsort(drawn)[bins])
    ends = np.cumsum(lengths, dtype=np.int64)
    for (source, dtype), (data, index) in zip(sources, pairs, strict=True):
        values = np.memmap(source, dtype=dtype, mode="r")
        with data.open("wb") as file:
            for item in items:
                file.write(values[ends[item] - lengths[item] : ends[item]].tobytes())
        write_index(index, dtype, lengths[items], bounds)
    return len(drawn)
