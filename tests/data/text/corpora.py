"""Small indexed files with known tokens, for the tests of this folder."""

from itertools import chain
from pathlib import Path

import numpy as np

from data.text.indexed import write_index
from data.text.megatron import megatron_core
from data.text.workers import tokenized
from data.tokenizer import Tokenizer

VOCAB_SIZE = 1000
EOD = 0


class NumberTokenizer(Tokenizer):
    """Text is numbers separated by spaces, and these are the ids."""

    def __init__(self, vocab_size=VOCAB_SIZE, eod=EOD):
        super().__init__("numbers", b"", vocab_size, eod)

    def tokenize(self, text):
        return [int(word) for word in text.split()]

    def detokenize(self, ids, special=False):
        return " ".join(map(str, ids))


def write_documents(prefix, documents, dtype=np.uint16):
    """Writes token ids as they are, with no check, unlike `data.text.prepare`."""
    megatron_core()  # without its warnings
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document, dtype=np.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_pair(prefix, documents):
    """Write documents, each a list of sequences of token ids, as Megatron's builder does."""
    megatron_core()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for sequences in documents:
        builder.add_document(
            np.array([*chain(*sequences)], dtype=np.int64), [len(ids) for ids in sequences]
        )
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_texts(texts, prefix, tokenizer):
    """Write documents as `data.text.prepare` does."""
    tokens = tokenized(tokenizer, texts)
    Path(f"{prefix}.bin").write_bytes(tokens.ids.tobytes())
    write_index(Path(f"{prefix}.idx"), tokens.ids.dtype, tokens.lengths)


def counting_documents(count, length=25, vocab_size=VOCAB_SIZE):
    """Documents of consecutive ids 1..vocab_size-1, going round, each ended by EOD."""
    ids = iter(range(count * length))
    return [
        [*(1 + next(ids) % (vocab_size - 1) for _ in range(length - 1)), EOD] for _ in range(count)
    ]


def document_starts(tokens, eod):
    """Mark the first token of every document of rows ``tokens`` [..., S], each ended by ``eod``."""
    starts = tokens.roll(1, -1) == eod
    starts[..., 0] = True
    return starts
