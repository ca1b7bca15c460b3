"""Samples of packed conversations, for `--sft`. S tokens of a sample.

The tokens are a `.bin/.idx` pair, in which a sequence is a conversation and a document is a sample; which of them are
learned is a second pair, PREFIX_loss_mask, of ones and zeros in the same places. Padding is not in the files.
"""

import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from data.text.blend import EpochedDataset
from data.text.indexed import LOSS_MASK, check_indexed, open_indexed
from data.text.packing import FRAGMENT, PackedEpoch, PackedSamples
from data.tokenizer import Tokenizer
from runtime.errors import DataError


class Conversations(PackedSamples):
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
        begins = np.concatenate(([0], np.cumsum(self.indexed.lengths, dtype=np.int64)))
        self.longest = int(np.diff(begins[self.indexed.bounds]).max())
        """Tokens of the longest sample."""
        if self.longest > seq_length:
            raise DataError(
                f"{prefix} holds samples of {self.longest} tokens and seq_length is {seq_length}; give --seq-length "
                f"{self.longest}, or prepare the conversations with --seq-length {seq_length}"
            )
        whole = np.zeros(len(self.indexed.lengths), FRAGMENT)
        whole["begin"], whole["length"] = begins[:-1], self.indexed.lengths
        super().__init__(self.indexed, whole, self.indexed.bounds, seq_length, masked)


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
        epoch = partial(PackedEpoch, conversations, begin, end, seed, tokenizer.eod)
        endless = EpochedDataset(
            epoch(0), epoch, name=f"{prefix}.bin", vocab_size=tokenizer.vocab_size, check=conversations.check
        )
        found.append(endless if share > 0 else None)
    return found
