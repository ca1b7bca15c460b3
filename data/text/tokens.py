"""Token ids of documents, as worker processes hand them back."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from data.errors import DataError
from data.text.indexed import id_type
from data.tokenizer import Tokenizer


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
    """What could not be used, a line each."""


def joined(tokenizer: Tokenizer, documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return `ids` and `lengths`, as in `Tokens`, of documents, int64 each.

    Raises:
        DataError: an id outside of the tokenizer's vocabulary, which the file's dtype would silently wrap.
    """
    ids = np.concatenate([np.zeros(0, np.int64), *documents])
    if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
        raise DataError(
            f"the tokenizer gives id {ids.max() if ids.min() >= 0 else ids.min()}, outside its {tokenizer.vocab_size} "
            "entries; use another tokenizer file"
        )
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    return ids.astype(id_type(tokenizer.vocab_size)), lengths


def tokenized(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    """Tokenize documents and end each with the end-of-document token; `counts` are those of the texts."""
    documents = [np.array([*tokenizer.tokenize(text), tokenizer.eod], dtype=np.int64) for text in texts]
    counts = Counter(read=len(texts), text_bytes=sum(len(text.encode()) for text in texts))
    ids, lengths = joined(tokenizer, documents)
    return Tokens(ids=ids, lengths=lengths, counts=counts)
