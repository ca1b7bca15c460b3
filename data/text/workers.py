"""Tokenize documents in several processes, in the order of the documents."""

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np

from data.text.indexed import id_type
from data.tokenizer import AddBos, Tokenizer
from runtime.errors import DataError, StoppedError
from runtime.signals import end_with_parent, signals_later

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 22
DROPPED = "dropped"
"""Key of the counter of tokens that are dropped because the vocabulary lacks them."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The T tokens of a group of documents, with counts and refused documents."""

    ids: np.ndarray
    """Token ids [T], in the dtype of the file."""
    lengths: np.ndarray
    """Number of tokens of each document, int32."""
    learned: np.ndarray | None = None
    """Loss mask, uint8 [T]: 1 for each token that carries loss; None if all tokens do."""
    counts: Counter[str] = field(default_factory=Counter)
    refused: Sequence[str] = ()
    """Messages about documents that could not be used, one line each."""


def joined(tokenizer: Tokenizer, documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents, int64 each; return the `ids` and `lengths` of `Tokens`.

    Raises DataError if an id is outside the tokenizer's vocabulary: in the file's dtype it would
    silently wrap around.
    """
    ids = np.concatenate([np.zeros(0, np.int64), *documents])
    if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"the tokenizer gives id {bad}, outside its {tokenizer.vocab_size} entries; "
            "use another tokenizer file"
        )
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    return ids.astype(id_type(tokenizer.vocab_size)), lengths


def tokenized(tokenizer: Tokenizer, texts: Sequence[str], add_bos_token: AddBos = "auto") -> Tokens:
    """Tokenize documents, each ended by the end-of-document token; count documents and bytes."""
    documents = []
    counts = Counter(read=len(texts), text_bytes=0)
    for text in texts:
        documents.append(np.array(tokenizer.document(text, add_bos_token), dtype=np.int64))
        counts["text_bytes"] += len(text.encode())
        counts[DROPPED] += tokenizer.dropped(text)
    ids, lengths = joined(tokenizer, documents)
    return Tokens(ids=ids, lengths=lengths, counts=counts)


def batched(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield groups of at most 256 items and about 4 million characters.

    The size of an item that is not text, such as a row, is unknown; 32 such items form a group.
    """
    batch: list[Any] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item) if isinstance(item, str) else _BATCH_CHARACTERS // 32
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield work(item) for each item, in order, from `workers` processes; 1 means this process.

    At most 2 items per process are read ahead, so that memory stays bounded if the consumer is
    slower. The processes end with this one, even if it is killed. Raises StoppedError if a process
    was killed.
    """
    if workers == 1:
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (os.getpid(),))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            with signals_later():  # submit may start a process
                pending.append(pool.submit(work, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise StoppedError(
            f"one of {workers} processes was killed, perhaps for lack of memory; "
            "give fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(parent: int) -> None:
    # Ctrl-C reaches every process; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
