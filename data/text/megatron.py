"""Adapter for megatron.core.datasets: from indexed token files to training samples."""

import json
import logging
import math
import os
import sys
import warnings
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.fingerprint import check_digests, digest, write_digests
from data.text.begins import check_begins
from data.text.blend import BlendedDataset, EpochedDataset, MockSamples, MockTokenizer
from data.text.config import DataConfig, blend, length_shares, split_shares
from data.text.documents import DocumentStream
from data.text.indexed import LOSS_MASK, Indexed, TokenReader, check_indexed, open_indexed
from data.text.packing import (
    Conversations,
    PackedEpoch,
    PackedSamples,
    packed_documents,
    read_packing,
    write_packing,
)
from runtime.errors import DataError
from runtime.files import InUseError, owned, replacing, sha256

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from data.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")
Samples = EpochedDataset | BlendedDataset | MockSamples


def build_datasets(
    config: DataConfig,
    seq_length: int,
    seed: int,
    tokenizer: "Tokenizer | MockTokenizer",
    vocab_size: int | None = None,
) -> tuple[Samples, Samples | None, Samples | None]:
    """Build the training, validation and test samples of `config.data_path`; None for a split whose
    share is 0.

    With ``mock_data`` all three are drawn, whatever the shares.

    Sample n is a pure function of (files, config, seq_length, seed, n): a dict of `tokens` and
    `labels`, int64 [seq_length], labels already shifted, `loss_mask`, float32 [seq_length], and, if
    documents are told apart, `starts`, bool [seq_length].

    ``vocab_size`` is the model's, by default the tokenizer's: data with an id that it lacks is
    refused by name.

    Collective over all ranks if a process group is initialised: rank 0 checks the files and writes
    the index caches, the others map them. A failure on one rank raises on all. Raises DataError: a
    bad file (`check_indexed`), a split without a single sample, or a cache that cannot be written.
    """
    import torch.distributed as dist

    from runtime.together import raise_together

    if seq_length < 1 or not 0 <= seed < 1 << 32:
        raise DataError(
            f"seq_length is {seq_length} and seed {seed}; they must be at least 1 and in [0, 2^32)"
        )
    if isinstance(tokenizer, MockTokenizer):
        drawn = [
            MockSamples(seq_length, tokenizer.vocab_size, seed + (part << 32)) for part in range(3)
        ]
        return drawn[0], drawn[1], drawn[2]
    prefixes, weights = blend(config.data_path)
    entries = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    if (lacking := tokenizer.missing(entries, tokenizer.eod)) is not None:
        raise DataError(
            f"tokenizer_model {tokenizer.path} ends documents and fills samples with it: {lacking}"
        )
    first = not dist.is_initialized() or dist.get_rank() == 0
    with raise_together():
        megatron_core()  # takes seconds: import on all ranks at once, not in turns
    splits: list[list[list[EpochedDataset]]] = []
    # Rank 0 scans the files and writes first; the others map only finished files.
    for turn in (first, not first):
        with raise_together():
            if turn:
                if first and not config.sft and (note := check_begins(prefixes, tokenizer)):
                    print(note, flush=True)
                given = [
                    (config, prefix, seq_length, seed, tokenizer, entries, first)
                    for prefix in prefixes
                ]
                splits = [
                    _conversation_splits(*of) if config.sft else _Source(*of).splits()
                    for of in given
                ]
    train, valid, test = (_join(list(parts), weights) for parts in zip(*splits, strict=True))
    if train is None:
        raise DataError(
            f'split is "{config.split}" and leaves nothing to train on; make its first share larger than 0'
        )
    return train, valid, test


def _join(parts: list[list[EpochedDataset]], weights: list[float] | None) -> Samples | None:
    """Blend a split's datasets: those of each file by their shares, the files by weights or else
    their tokens.
    """
    present = [dataset for of_file in parts for dataset in of_file]
    by_file = weights or [sum(len(part) * part.fill for part in of_file) for of_file in parts]
    shares = [
        weight * part.share
        for weight, of_file in zip(by_file, parts, strict=True)
        for part in of_file
    ]
    if len(present) > 1:
        return BlendedDataset(present, shares)
    return present[0] if present else None


def _conversation_splits(
    config: DataConfig,
    prefix: str,
    seq_length: int,
    seed: int,
    tokenizer: "Tokenizer",
    entries: int,
    check: bool,
) -> list[list[EpochedDataset]]:
    """Return endless datasets per split of conversations, whose splits are of samples; none where
    the share is 0.

    Raises DataError: a share leaves none.
    """
    missing = partial(tokenizer.missing, entries)
    samples = Conversations(prefix, entries, seq_length, check, missing)
    if check:
        samples.indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
    shares, splits = split_shares(config.split), list[list[EpochedDataset]]()
    bounds = pairwise([0, *(round(end * len(samples)) for end in np.cumsum(shares))])
    for share, (begin, end) in zip(shares, bounds, strict=True):
        if share > 0 and begin == end:
            raise DataError(
                f"{prefix} holds {len(samples)} samples of conversations, and a share of {share:g} in split leaves "
                "none; give it a larger share, or 0, with --eval-iters 0"
            )
        epoch = partial(PackedEpoch, samples, begin, end, seed, tokenizer.eod)
        endless = EpochedDataset(
            epoch(0),
            epoch,
            name=f"{prefix}.bin",
            vocab_size=entries,
            missing=missing,
            check=samples.check,
        )
        splits.append([endless] if share > 0 else [])
    return splits


class Part(NamedTuple):
    """Documents of a split, all or those of some lengths."""

    split: str
    longer: int = 0
    """Tokens of which the documents have more."""
    upto: float = math.inf
    """Tokens of which they have no more."""
    share: float = 1.0
    """Share of the split's tokens that is drawn from them, below 1 unless they are all."""

    @property
    def name(self) -> str:
        """Return the beginning of the names of its files."""
        return f"{self.split}-{self.longer}"

    @property
    def lengths(self) -> str:
        """Say which lengths, after the number of documents; empty for all."""
        if self.share == 1:
            return ""
        return f" of more than {self.longer} tokens" + (
            f", up to {self.upto}" if self.upto < math.inf else ""
        )


def parts_of(config: DataConfig) -> list[Part]:
    """Return the parts of a file by split; by length in training alone, as a validation is to be of
    all.
    """
    wanted = [
        split for split, share in zip(SPLITS, split_shares(config.split), strict=True) if share > 0
    ]
    if not config.blend_by_length or SPLITS[0] not in wanted:
        return [Part(split) for split in wanted]
    longer, shares = zip(*length_shares(config.blend_by_length), strict=True)
    by_length = [
        Part(SPLITS[0], *of) for of in zip(longer, (*longer[1:], math.inf), shares, strict=True)
    ]
    return by_length + [Part(split) for split in wanted[1:]]


class _Source:
    """The files of one prefix, GPTDataset's configuration and index cache for them, and the splits."""

    def __init__(
        self,
        config: DataConfig,
        prefix: str,
        seq_length: int,
        seed: int,
        tokenizer: "Tokenizer",
        entries: int,
        check: bool,
    ) -> None:
        if os.path.exists(f"{prefix}{LOSS_MASK}.idx"):
            raise DataError(
                f"{prefix} holds conversations, of which not all is learned ({prefix}{LOSS_MASK}.idx); give --sft"
            )
        # Absolute: GPTDataset names caches by the path as given.
        self.prefix = os.path.abspath(prefix)
        self.config, self.seq_length, self.seed, self.tokenizer = (
            config,
            seq_length,
            seed,
            tokenizer,
        )
        self.entries, self.missing = entries, partial(tokenizer.missing, entries)
        self.indexed: Indexed = open_indexed(self.prefix)
        if check:
            check_indexed(self.prefix, entries, missing=self.missing)
            self.indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
        self.lengths = self.indexed.document_lengths
        if check and self.indexed.is_lumped:
            print(
                f"note: {self.prefix}.idx has one document of {len(self.lengths):,} sequences: each sequence is taken "
                "as a document",
                file=sys.stderr,
            )
        self.dataset = megatron_core().IndexedDataset(self.prefix, mmap=False)
        self.reader = self.dataset.bin_reader = TokenReader(self.prefix)
        if self.indexed.joins_sequences:
            # GPTDataset shuffles and cuts sequences: it gets whole documents as such.
            tokens_before = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
            self.dataset.index.sequence_lengths = self.lengths
            self.dataset.index.sequence_pointers = tokens_before * self.indexed.dtype.itemsize
        self.writes = check
        self.parts = parts_of(config)

    def gpt_config(self, epoch: int, cache: str) -> "GPTDatasetConfig":
        return megatron_core().GPTDatasetConfig(
            random_seed=(self.seed + epoch) % (1 << 32),
            sequence_length=self.seq_length,
            blend=([self.prefix], None),
            split=self.config.split,
            path_to_cache=cache,
            tokenizer=self.tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            # it knows no documents but those with an end token: EpochedDataset masks
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def splits(self) -> list[list[EpochedDataset]]:
        """Return endless datasets per split, none where the share is 0."""
        for part in self.parts:
            self.check(part)
        cache = self.cache()
        return [
            [self.endless(part, cache) for part in self.parts if part.split == split]
            for split in SPLITS
        ]

    def check(self, part: Part) -> None:
        """Raise DataError if a part does not fill one sample."""
        documents, packing = self.documents(part), self.config.pack_documents
        tokens, least = (
            int(self.lengths[documents].sum(dtype="int64")),
            1 if packing else self.seq_length + 1,
        )
        if tokens >= least:
            return
        found = (
            f'{self.prefix}: split "{self.config.split}" leaves the {part.split} split {len(documents)} documents'
            f"{part.lengths} with {tokens} tokens, but one sample takes {'' if packing else 'seq_length + 1 = '}{least}"
        )
        if part.lengths:
            raise DataError(
                f"{found}; give --blend-by-length lengths that every file has, or leave it out"
            )
        raise DataError(
            f"{found}; documents are what is shared out: give it a larger share (or 0, with --eval-iters 0), more "
            "documents, or a smaller seq_length"
        )

    def endless(self, part: Part, cache: str) -> EpochedDataset:
        # Each reader builds later epochs' indices in memory, possibly a worker process in mid-run,
        # where no collective and no write can happen. It takes about a second per 10 million
        # documents.
        build: Any = partial(self.stream, part)
        try:
            if self.config.pack_documents:
                samples = PackedSamples(
                    self.indexed, *read_packing(Path(cache, part.name)), self.seq_length
                )
                build = partial(
                    PackedEpoch, samples, 0, len(samples), self.seed, self.tokenizer.eod
                )
                first, fill = build(0), samples.fill
            else:
                first, fill = self.stream(part, 0, cache), 1.0
        except (OSError, EOFError, ValueError) as error:
            raise DataError(
                f"the index cache {cache} cannot be read ({error}); if it is damaged, remove it, and if another "
                f"machine wrote it, give --data-cache-path a folder that all machines share"
            ) from error
        return EpochedDataset(
            first,
            build,
            name=f"{self.prefix}.bin",
            vocab_size=self.entries,
            missing=self.missing,
            eod_mask_loss=self.config.eod_mask_loss,
            tells_documents=self.config.tells_documents,
            check=self.reader.check,
            share=part.share,
            fill=fill,
        )

    def documents(self, part: Part) -> np.ndarray:
        """Return the numbers of a part's documents, int32; splits are rounded as by
        BlendedMegatronDatasetBuilder.
        """
        shares = self.gpt_config(0, "").split_matrix[SPLITS.index(part.split)]
        begin, end = (round(share * len(self.lengths)) for share in shares)
        lengths = self.lengths[begin:end]
        chosen = (
            slice(None) if part.share == 1 else (part.longer < lengths) & (lengths <= part.upto)
        )
        return np.arange(begin, end, dtype=np.int32)[chosen]

    def stream(self, part: Part, epoch: int, cache: str = "") -> "GPTDataset | DocumentStream":
        """Return `gpt_dataset` with the boundaries of documents in its samples, if they are asked
        for.
        """
        dataset = self.gpt_dataset(part, epoch, cache)
        if not (self.config.eod_mask_loss or self.config.tells_documents):
            return dataset
        return DocumentStream(dataset, self.lengths, self.tokenizer.eod)

    def gpt_dataset(self, part: Part, epoch: int, cache: str = "") -> "GPTDataset":
        """Build one epoch of a part; an empty `cache` keeps its indices in memory."""
        megatron = megatron_core()
        # It names a cache by the path and the split.
        path, split = self.prefix + part.lengths, megatron.Split(SPLITS.index(part.split))
        return megatron.GPTDataset(
            self.dataset, path, self.documents(part), None, split, self.gpt_config(epoch, cache)
        )

    def cache(self) -> str:
        """Return the folder of the first epoch's indices, written by rank 0 if missing.

        GPTDataset's own cache names ignore the data: a corpus rewritten at the same path would be
        cut by the old indices, and a cache half-written by a killed run would pass for whole. Hence
        one folder per content, put in place by one rename.
        """
        import megatron.core

        key = {
            "idx": digest(Path(f"{self.prefix}.idx")),
            "prefix": self.prefix,
            "tokenizer": self.tokenizer.unique_identifiers,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "split": self.config.split,
            "megatron": megatron.core.__version__,
            "digests": 1,
        }
        if self.config.blend_by_length:
            key["blend_by_length"] = length_shares(self.config.blend_by_length)
        if self.indexed.joins_sequences:
            key["joins_sequences"] = 1
        if self.config.pack_documents:
            key["packing"] = 2
        root = Path(self.config.data_cache_path or os.path.join(self.prefix, "cache"))
        folder = root.absolute() / sha256(json.dumps(key, sort_keys=True))[:24]
        if not folder.is_dir() and self.writes:
            self.write_cache(folder)
        for path in folder.glob("*.npy"):
            with path.open("rb") as file:
                # numpy reads any other file as a pickle, and GPTDataset allows it to execute code
                if file.read(6) != b"\x93NUMPY":
                    raise DataError(
                        f"{path} is not a numpy array; remove {folder}, which is then written anew"
                    )
        if self.writes:
            check_digests(folder)
        return str(folder)

    def write_cache(self, folder: Path) -> None:
        try:
            # A second run waits for the first, which takes no longer than its own cache would.
            with owned(folder.parent, folder.name, wait=True):
                if folder.is_dir():
                    return
                with replacing(folder) as (draft,):
                    draft.mkdir()
                    for part in self.parts:
                        if self.config.pack_documents:
                            packing = packed_documents(
                                self.lengths, self.documents(part), self.seq_length, self.seed
                            )
                            write_packing(draft / part.name, *packing)
                        else:
                            self.gpt_dataset(part, 0, str(draft))
                    write_digests(draft)
        except (OSError, InUseError) as error:
            # Without locks another run may have finished the same folder, which is as good as ours.
            if not folder.is_dir():
                said = error.strerror if isinstance(error, OSError) else error
                raise DataError(
                    f"the sample indices of {self.prefix} cannot be written to {folder.parent} ({said}); "
                    f"give --data-cache-path a folder that you can write to and all machines share"
                ) from error


@cache
def megatron_core() -> Any:
    """Import megatron.core's GPTDataset late, since it takes seconds, and without its warnings;
    return its module.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
        from megatron.core.datasets import gpt_dataset

    # It warns that each later epoch's indices are not saved, which is intended.
    logging.getLogger(gpt_dataset.__name__).setLevel(logging.ERROR)
    return gpt_dataset
