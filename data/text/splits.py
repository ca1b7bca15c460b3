"""Split one pair of token files into endless datasets, by Megatron's GPTDataset or by packing.

Two parts of GPTDataset are replaced. Its index covers all epochs of a run; here each epoch has a
separate index, so that sample n does not depend on the length of a run. And it names its caches
only by path and settings: a corpus that is rewritten at the same path would be cut by the old
indices, and a cache that a killed run had half written would look complete. Here a cache is a
folder named by a digest of everything that its content depends on, moved into place by one rename.
"""

import json
import logging
import math
import os
import sys
import warnings
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.fingerprint import check_digests, digest, write_digests
from data.text.blend import EpochedDataset
from data.text.config import DataConfig, length_shares, split_shares
from data.text.documents import DocumentStream
from data.text.indexed import LOSS_MASK, Indexed, check_indexed, open_indexed
from data.text.packing import (
    PackedEpoch,
    PackedSamples,
    packed_documents,
    read_packing,
    write_packing,
)
from data.text.reader import TokenReader
from runtime.errors import DataError
from runtime.files import InUseError, owned, replacing, sha256

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from data.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")


class DocumentGroup(NamedTuple):
    """A group of a split's documents: all of them, or those with lengths in a range."""

    split: str
    longer_than: int = 0
    """Number of tokens that every document of the group exceeds."""
    up_to: float = math.inf
    """Maximum number of tokens of a document."""
    share: float = 1.0
    """Share of the split's tokens that comes from this group; 1 if it has all documents."""

    @property
    def name(self) -> str:
        """Prefix of the names of the group's cache files."""
        return f"{self.split}-{self.longer_than}"

    @property
    def lengths(self) -> str:
        """Words for the range of lengths, to follow a number of documents; empty for all lengths.

        They are part of a cache's name.
        """
        if self.share == 1:
            return ""
        text = f" of more than {self.longer_than} tokens"
        if self.up_to < math.inf:
            text += f", up to {self.up_to}"
        return text


def document_groups(config: DataConfig) -> list[DocumentGroup]:
    """Return the groups of a file's documents, one split after the other.

    Only training is blended by length, because the validation loss should cover all documents.
    """
    groups = []
    for split, share in zip(SPLITS, split_shares(config.split), strict=True):
        if share == 0:
            continue
        if split != SPLITS[0] or not config.blend_by_length:
            groups.append(DocumentGroup(split))
            continue
        lengths = length_shares(config.blend_by_length)
        limits = [*(longer_than for longer_than, _ in lengths[1:]), math.inf]
        for (longer_than, length_share), up_to in zip(lengths, limits, strict=True):
            groups.append(DocumentGroup(split, longer_than, up_to, length_share))
    return groups


class TextFile:
    """The pair of files at a prefix, with its index cache and its splits.

    With ``check`` the files are checked and a missing cache is written: rank 0 does this.
    """

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
                f"{prefix} holds conversations with a loss mask ({prefix}{LOSS_MASK}.idx), "
                "which only --sft applies; give --sft"
            )
        # Absolute: GPTDataset names caches by the path as given.
        self.prefix = os.path.abspath(prefix)
        self.config = config
        self.seq_length = seq_length
        self.seed = seed
        self.tokenizer = tokenizer
        self.entries = entries
        self.missing = partial(tokenizer.missing, entries)
        self.writes = check
        self.groups = document_groups(config)

        self.indexed: Indexed = open_indexed(self.prefix)
        if check:
            check_indexed(self.prefix, entries, missing=self.missing)
            self.indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
        self.lengths = self.indexed.document_lengths
        if check and self.indexed.is_lumped:
            print(
                f"note: {self.prefix}.idx has one document of {len(self.lengths):,} sequences: "
                "each sequence counts as a document",
                file=sys.stderr,
            )

        self.dataset = megatron_core().IndexedDataset(self.prefix, mmap=False)
        self.reader = self.dataset.bin_reader = TokenReader(self.prefix)
        if self.indexed.joins_sequences:
            # GPTDataset shuffles and cuts sequences: give it whole documents as sequences.
            tokens_before = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
            self.dataset.index.sequence_lengths = self.lengths
            self.dataset.index.sequence_pointers = tokens_before * self.indexed.dtype.itemsize

    def splits(self) -> list[list[EpochedDataset]]:
        """Return the endless datasets of each split; a split with share 0 has none."""
        for group in self.groups:
            self._check_size(group)
        folder = self._cache()
        by_split: dict[str, list[EpochedDataset]] = {split: [] for split in SPLITS}
        for group in self.groups:
            by_split[group.split].append(self._endless(group, folder))
        return list(by_split.values())

    def _check_size(self, group: DocumentGroup) -> None:
        """Raise DataError if a group does not fill one sample."""
        documents = self._documents(group)
        tokens = int(self.lengths[documents].sum(dtype="int64"))
        minimum = self.seq_length + 1
        needed = f"seq_length + 1 = {minimum}"
        if self.config.pack_documents:
            minimum = 1
            needed = "1"
        if tokens >= minimum:
            return

        problem = (
            f'{self.prefix}: split "{self.config.split}" leaves the {group.split} split '
            f"{len(documents)} documents{group.lengths} with {tokens} tokens in all, but one "
            f"sample needs {needed}"
        )
        if group.lengths:
            raise DataError(
                f"{problem}; give --blend-by-length lengths that every file has, or leave out "
                "--blend-by-length"
            )
        raise DataError(
            f"{problem}; splits consist of whole documents: give this split a larger share (or 0, "
            "with --eval-iters 0), or give more documents or a smaller seq_length"
        )

    def _documents(self, group: DocumentGroup) -> np.ndarray:
        """Return the numbers of a group's documents, int32.

        Splits are rounded as BlendedMegatronDatasetBuilder rounds them.
        """
        shares = self._gpt_config(0, "").split_matrix[SPLITS.index(group.split)]
        begin, end = (round(share * len(self.lengths)) for share in shares)
        documents = np.arange(begin, end, dtype=np.int32)
        if group.share == 1:
            return documents
        lengths = self.lengths[begin:end]
        return documents[(group.longer_than < lengths) & (lengths <= group.up_to)]

    def _endless(self, group: DocumentGroup, folder: str) -> EpochedDataset:
        # Each reader builds the indices of later epochs in memory, since a reader may be a worker
        # process in the middle of a run, which cannot run collectives or write the cache. This
        # takes about a second per 10 million documents.
        build: Any = partial(self._stream, group)
        fill = 1.0
        try:
            if self.config.pack_documents:
                fragments, bounds = read_packing(Path(folder, group.name))
                samples = PackedSamples(self.indexed, fragments, bounds, self.seq_length)
                eod = self.tokenizer.eod
                build = partial(PackedEpoch, samples, 0, len(samples), self.seed, eod)
                first = build(0)
                fill = samples.fill
            else:
                first = self._stream(group, 0, folder)
        except (OSError, EOFError, ValueError) as error:
            raise DataError(
                f"the index cache {folder} cannot be read ({error}); if it is damaged, remove it, "
                "and if another machine wrote it, give --data-cache-path a folder that all "
                "machines share"
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
            share=group.share,
            fill=fill,
        )

    def _stream(
        self, group: DocumentGroup, epoch: int, folder: str = ""
    ) -> "GPTDataset | DocumentStream":
        """Return an epoch, with the boundaries of documents if the configuration needs them."""
        dataset = self._gpt_dataset(group, epoch, folder)
        if not (self.config.eod_mask_loss or self.config.tells_documents):
            return dataset
        return DocumentStream(dataset, self.lengths, self.tokenizer.eod)

    def _gpt_dataset(self, group: DocumentGroup, epoch: int, folder: str = "") -> "GPTDataset":
        """Build one epoch; cache its index in `folder`, or in memory if that is empty."""
        megatron = megatron_core()
        return megatron.GPTDataset(
            self.dataset,
            self.prefix + group.lengths,  # caches are named by this and the split
            self._documents(group),
            None,
            megatron.Split(SPLITS.index(group.split)),
            self._gpt_config(epoch, folder),
        )

    def _gpt_config(self, epoch: int, folder: str) -> "GPTDatasetConfig":
        return megatron_core().GPTDatasetConfig(
            random_seed=(self.seed + epoch) % (1 << 32),
            sequence_length=self.seq_length,
            blend=([self.prefix], None),
            split=self.config.split,
            path_to_cache=folder,
            tokenizer=self.tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            # GPTDataset only knows documents with an end token, so EpochedDataset masks instead.
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def _cache(self) -> str:
        """Return the folder of the first epoch's indices; rank 0 writes it if it is missing."""
        folder = self._cache_folder()
        if not folder.is_dir() and self.writes:
            self._write_cache(folder)
        for path in folder.glob("*.npy"):
            with path.open("rb") as file:
                # numpy reads any other file as a pickle, and GPTDataset allows it to execute code
                if file.read(6) != b"\x93NUMPY":
                    raise DataError(
                        f"{path} is not a numpy array; remove {folder}, and the next run writes it "
                        "again"
                    )
        if self.writes:
            check_digests(folder)
        return str(folder)

    def _cache_folder(self) -> Path:
        """Return the cache's folder, named by a digest of all that its content depends on."""
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
        # Added only if they are set: caches of earlier versions keep their names.
        if self.config.blend_by_length:
            key["blend_by_length"] = length_shares(self.config.blend_by_length)
        if self.indexed.joins_sequences:
            key["joins_sequences"] = 1
        if self.config.pack_documents:
            key["packing"] = 2
        root = Path(self.config.data_cache_path or os.path.join(self.prefix, "cache"))
        return root.absolute() / sha256(json.dumps(key, sort_keys=True))[:24]

    def _write_cache(self, folder: Path) -> None:
        try:
            # A second run waits until the first has written the cache, and need not write it again.
            with owned(folder.parent, folder.name, wait=True):
                if folder.is_dir():
                    return
                with replacing(folder) as (draft,):
                    draft.mkdir()
                    for group in self.groups:
                        self._write_indices(group, draft)
                    write_digests(draft)
        except (OSError, InUseError) as error:
            # Without locks another run may have finished the same folder, which serves as well.
            if not folder.is_dir():
                message = error.strerror if isinstance(error, OSError) else error
                raise DataError(
                    f"the sample indices of {self.prefix} cannot be written to {folder.parent} "
                    f"({message}); give --data-cache-path a folder that you can write to and all "
                    "machines share"
                ) from error

    def _write_indices(self, group: DocumentGroup, folder: Path) -> None:
        if not self.config.pack_documents:
            self._gpt_dataset(group, 0, str(folder))
            return
        fragments, bounds = packed_documents(
            self.lengths, self._documents(group), self.seq_length, self.seed
        )
        write_packing(folder / group.name, fragments, bounds)


@cache
def megatron_core() -> Any:
    """Import megatron.core's module of GPTDataset, late and without its warnings.

    The import takes seconds.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
        from megatron.core.datasets import gpt_dataset

    # GPTDataset warns that each later epoch's indices are not saved, which is intended.
    logging.getLogger(gpt_dataset.__name__).setLevel(logging.ERROR)
    return gpt_dataset
