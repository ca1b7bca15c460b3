"""Samples of packed conversations, for `--sft`. S tokens of a sample.

The tokens are a `.bin/.idx` pair, in which a sequence is a conversation and a document is a sample; which of them are
learned is a second pair, PREFIX_loss_mask, of ones and zeros in the same places. Padding is not in the files.
"""

import os
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from data.text.blend import EpochedDataset
from data.text.indexed import LOSS_MASK, TokenReader, check_indexed, open_indexed
from data.tokenizer import Tokenizer
from runtime.errors import DataError

PADDING_DOCUMENT = 1024
"""Tokens of a document of padding: attention inside of it costs little, however much there is."""


class Conversations:
    """The conversations at a prefix, by sample; with ``check`` all of both pairs is read that `check_indexed` does.

    Raises DataError: a broken pair, two that do not go together, or a sample longer than S.
    """

    def __init__(self, prefix: str, vocab_size: int, seq_length: int, check: bool) -> None:
        mask = prefix + LOSS_MASK
        if not os.path.exists(f"{mask}.idx"):
            raise DataError(
                f"{mask}.idx does not exist; --sft reads conversations that tools/prepare_data.py --chat wrote"
            )
        self.indexed = check_indexed(prefix, vocab_size) if check else open_indexed(prefix)
        masked = check_indexed(mask, 2) if check else open_indexed(mask)
        if check and not (
            np.array_equal(masked.lengths, self.indexed.lengths) and np.array_equal(masked.bounds, self.indexed.bounds)
        ):
            raise DataError(f"{mask}.idx and {prefix}.idx are of different conversations; write them again")
        self._begins = np.concatenate(([0], np.cumsum(self.indexed.lengths, dtype=np.int64)))[self.indexed.bounds]
        self.longest = int(np.diff(self._begins).max())
        """Tokens of the longest sample."""
        if self.longest > seq_length:
            raise DataError(
                f"{prefix} holds samples of {self.longest} tokens and seq_length is {seq_length}; give --seq-length "
                f"{self.longest}, or prepare the conversations with --seq-length {seq_length}"
            )
        self._readers = TokenReader(prefix), TokenReader(mask)
        self._mask_type = masked.dtype.type
        self._seq_length = seq_length

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._begins) - 1

    def check(self) -> None:
        """Raise DataError if a file's size has changed since the start."""
        for reader in self._readers:
            reader.check()

    def sample(self, number: int | None, eod: int) -> dict[str, Tensor]:
        """Return a sample, or for None padding alone: `tokens`, `labels`, `loss_mask`, `starts`, each [S].

        A conversation's last token has no label, since the next one is another's. Padding is `eod`, without loss.
        """
        size = 0 if number is None else int(self._begins[number + 1] - self._begins[number])
        tokens = torch.full((self._seq_length,), eod)
        labels, loss_mask = tokens.clone(), torch.zeros(self._seq_length)
        starts = torch.zeros(self._seq_length, dtype=torch.bool)
        starts[size::PADDING_DOCUMENT] = True
        if number is not None and size:
            begin, dtype = int(self._begins[number]), self.indexed.dtype
            ids = self._readers[0].read(dtype.type, size, begin * dtype.itemsize)
            learned = self._readers[1].read(self._mask_type, size, begin * np.dtype(self._mask_type).itemsize)
            first, last = self.indexed.bounds[number : number + 2]
            ends = torch.from_numpy(np.cumsum(self.indexed.lengths[first:last], dtype=np.int64))
            tokens[:size] = torch.from_numpy(ids.astype(np.int64))
            labels[: size - 1] = tokens[1:size]
            loss_mask[: size - 1] = torch.from_numpy(learned[1:].astype(np.float32))
            loss_mask[ends - 1] = 0
            starts[0] = True
            starts[ends[:-1]] = True
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "starts": starts}


class Epoch:
    """Samples [begin, end) of conversations in a random order, as an epoch of an EpochedDataset."""

    def __init__(self, conversations: Conversations, begin: int, end: int, seed: int, eod: int, epoch: int) -> None:
        self._conversations, self._eod = conversations, eod
        self._order = begin + np.random.default_rng((seed, epoch)).permutation(end - begin)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._order)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        """Return a sample, or for None padding alone."""
        return self._conversations.sample(None if index is None else int(self._order[index]), self._eod)


def conversation_splits(
    prefix: str, tokenizer: Tokenizer, shares: Sequence[float], seq_length: int, seed: int, check: bool
) -> list[EpochedDataset | None]:
    """Return an endless dataset per share of a prefix's samples, None where the share is 0.

    Args:
        check: read the files as `Conversations` does.

    Raises DataError: `Conversations`, or a share that leaves no sample.
    """
    conversations = Conversations(prefix, tokenizer.vocab_size, seq_length, check)
    if check:
        conversations.indexed.check_tokenizer(tokenizer.path, tokenizer.sha256)
    ends = [0, *(round(end * len(conversations)) for end in np.cumsum(shares))]
    found: list[EpochedDataset | None] = []
    for share, begin, end in zip(shares, ends, ends[1:], strict=False):
        if share > 0 and begin == end:
            raise DataError(
                f"{prefix} holds {len(conversations)} samples of conversations, and a share of {share:g} in split "
                "leaves none; give it a larger share, or 0, with --eval-iters 0"
            )
        epoch = partial(Epoch, conversations, begin, end, seed, tokenizer.eod)
        endless = EpochedDataset(
            epoch(0), epoch, name=f"{prefix}.bin", vocab_size=tokenizer.vocab_size, check=conversations.check
        )
        found.append(endless if share > 0 else None)
    return found
