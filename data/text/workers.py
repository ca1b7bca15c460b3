"""Documents to token ids in several processes, in the order of the documents."""

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

_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 1 << 22
DROPPED = "dropped"
"""Name of the count of tokens that texts lack, since the tokenizer has none for them."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Some documents' T tokens, and what is to be said of them."""

    ids: np.ndarray
    """[T], of the dtype in the file."""
    lengths: np.ndarray
    """Tokens of each document, int32."""
    learned: np.ndarray | None = None
    """Which tokens carry loss, uint8 [T]; None for all."""
    counts: Counter[str] = field(default_factory=Counter)
    refused: Sequence[str] = ()
    """Documents that could not be used, a line each."""


def joined(tokenizer: Tokenizer, documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return `ids` and `lengths`, as in `Tokens`, of documents, int64 each.

    Raises DataError: an id outside of the tokenizer's vocabulary, which the file's dtype would
    silently wrap.
    """
    ids = np.concatenate([np.zeros(0, np.int64), *documents])
    if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
        raise DataError(
            f"the tokenizer gives id {ids.max() if ids.min() >= 0 else ids.min()}, outside its {tokenizer.vocab_size} "
            "entries; use another tokenizer file"
        )
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    return ids.astype(id_type(tokenizer.vocab_size)), lengths


def tokenized(tokenizer: Tokenizer, texts: Sequence[str], add_bos_token: AddBos = "auto") -> Tokens:
    """Tokenize documents and end each with the end-of-document token; `counts` are those of the
    texts.
    """
    documents = [
        np.array(tokenizer.document(text, add_bos_token), dtype=np.int64) for text in texts
    ]
    counts = Counter(read=len(texts), text_bytes=sum(len(text.encode()) for text in texts))
    counts[DROPPED] = sum(map(tokenizer.dropped, texts))
    ids, lengths = joined(tokenizer, documents)
    return Tokens(ids=ids, lengths=lengths, counts=counts)


def batched(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield documents together, up to about 4 million characters, or rows, of a size that is not
    known.
    """
    batch: list[Any] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item) if isinstance(item, str) else _BATCH_CHARACTERS // 32
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield `work` of each item, in order, computed in as many processes; 1 is this one.

    At most 2 items a process are read ahead. The processes end with this one, even if it is killed.
    Raises StoppedError: a process was killed.
    """
    if workers == 1:
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (os.getpid(),))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            with signals_later():  # it may start a process
                pending.append(pool.submit(work, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise StoppedError(
            f"one of {workers} processes was killed, perhaps for memory; give fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(parent: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process; the first one ends the others
    end_with_parent(parent)
