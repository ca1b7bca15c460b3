"""Build the training, validation and test samples of a run from its token files."""

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from data.text.begins import check_begins
from data.text.blend import BlendedDataset, EpochedDataset, MockSamples, MockTokenizer
from data.text.config import DataConfig, blend, split_shares
from data.text.packing import Conversations, PackedEpoch
from data.text.splits import TextFile, megatron_core
from runtime.errors import DataError

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

Samples = EpochedDataset | BlendedDataset | MockSamples
Splits = list[list[EpochedDataset]]
"""A file's datasets for each split: training, validation and test."""


def build_datasets(
    config: DataConfig,
    seq_length: int,
    seed: int,
    tokenizer: "Tokenizer | MockTokenizer",
    vocab_size: int | None = None,
) -> tuple[Samples, Samples | None, Samples | None]:
    """Build the training, validation and test samples of `config.data_path`.

    A split whose share is 0 is None. With ``mock_data`` all three exist, whatever the shares.

    Sample n is a pure function of (files, config, seq_length, seed, n): a dict of `tokens` and
    `labels`, int64 [seq_length], labels already shifted, `loss_mask`, float32 [seq_length], and, if
    `config.tells_documents`, `starts`, bool [seq_length].

    ``vocab_size`` is the model's, by default the tokenizer's. A token id that the model lacks
    raises an error that names the token.

    Collective over all ranks if a process group is initialised: rank 0 checks the files and writes
    the index caches, the others map them. A failure on one rank raises on all. Raises DataError if
    a file is bad (`check_indexed`), a split has no sample, or a cache cannot be written.
    """
    import torch.distributed as dist

    from runtime.together import raise_together

    if seq_length < 1 or not 0 <= seed < 1 << 32:
        raise DataError(
            f"seq_length is {seq_length} and seed is {seed}; seq_length must be 1 or more, and "
            "seed from 0 to 2^32 - 1"
        )
    if isinstance(tokenizer, MockTokenizer):
        size = tokenizer.vocab_size
        return (
            MockSamples(seq_length, size, seed),
            MockSamples(seq_length, size, seed + (1 << 32)),
            MockSamples(seq_length, size, seed + (2 << 32)),
        )

    prefixes, weights = blend(config.data_path)
    entries = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    message = tokenizer.missing(entries, tokenizer.eod)
    if message is not None:
        raise DataError(
            f"tokenizer_model {tokenizer.path} ends documents with a token that the model lacks: "
            f"{message}"
        )
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with raise_together():
        megatron_core()  # takes seconds: import on all ranks at once, not in turns

    files: list[Splits] = []
    # Rank 0 first checks the files and writes the caches, so the others map only finished caches.
    for is_turn in (is_first, not is_first):
        with raise_together():
            if not is_turn:
                continue
            if is_first and not config.sft and (note := check_begins(prefixes, tokenizer)):
                print(note, flush=True)
            for prefix in prefixes:
                options = (config, prefix, seq_length, seed, tokenizer, entries, is_first)
                if config.sft:
                    files.append(_conversation_splits(*options))
                else:
                    files.append(TextFile(*options).splits())

    train, valid, test = (_join(list(split), weights) for split in zip(*files, strict=True))
    if train is None:
        raise DataError(
            f'split is "{config.split}", but it leaves nothing to train on; '
            "make its first share larger than 0"
        )
    return train, valid, test


def _join(
    files: list[list[EpochedDataset]], weights: list[float] | None
) -> EpochedDataset | BlendedDataset | None:
    """Blend a split's datasets, each weighted by its file's weight times its share of the file.

    Without weights, a file's weight is its number of tokens.
    """
    datasets: list[EpochedDataset] = []
    shares: list[float] = []
    for number, parts in enumerate(files):
        if weights is None:
            weight: float = sum(len(part) * part.fill for part in parts)
        else:
            weight = weights[number]
        datasets += parts
        shares += [weight * part.share for part in parts]
    if len(datasets) > 1:
        return BlendedDataset(datasets, shares)
    return datasets[0] if datasets else None


def _conversation_splits(
    config: DataConfig,
    prefix: str,
    seq_length: int,
    seed: int,
    tokenizer: "Tokenizer",
    entries: int,
    check: bool,
) -> Splits:
    """Return each split's endless dataset of packed conversations; none if its share is 0.

    Splits are cut between samples, which are already packed and shuffled. Raises DataError if a
    share above 0 leaves no sample.
    """
    missing = partial(tokenizer.missing, entries)
    samples = Conversations(prefix, entries, seq_length, check, missing)
    if check:
        samples.indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
    shares = split_shares(config.split)
    bounds = [0, *(round(end * len(samples)) for end in np.cumsum(shares))]

    splits: Splits = []
    for share, (begin, end) in zip(shares, pairwise(bounds), strict=True):
        if share == 0:
            splits.append([])
            continue
        if begin == end:
            raise DataError(
                f"{prefix} has {len(samples)} samples of conversations, and a share of "
                f"{share:g} in split leaves none; make that share larger, or 0 with --eval-iters 0"
            )
        build = partial(PackedEpoch, samples, begin, end, seed, tokenizer.eod)
        endless = EpochedDataset(
            build(0),
            build,
            name=f"{prefix}.bin",
            vocab_size=entries,
            missing=missing,
            check=samples.check,
        )
        splits.append([endless])
    return splits
