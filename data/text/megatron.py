"""Adapter for megatron.core.datasets: from indexed token files to training samples."""

import json
import logging
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data.chat.samples import conversation_splits
from data.fingerprint import check_digests, write_digests
from data.text.blend import BlendedDataset, EpochedDataset
from data.text.config import DataConfig, blend, split_shares
from data.text.indexed import LOSS_MASK, Indexed, TokenReader, check_indexed, open_indexed
from runtime.errors import DataError
from runtime.files import InUseError, owned, replacing, sha256

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from data.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class MockTokenizer:
    """Stands where a run's tokenizer would."""

    vocab_size: int


@dataclass(frozen=True)
class MockSamples:
    """Endless samples of ``seq_length`` tokens; small ids are frequent, so that there is something to learn."""

    seq_length: int
    vocab_size: int
    seed: int

    def __len__(self) -> int:
        """Return the samples of an epoch, which is said in progress lines alone."""
        return 1 << 20

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return sample ``index``, a function of the seed and the index, or for None a filler without loss.

        ``tokens`` and ``labels`` are int64, ``loss_mask`` is float32, each [S].
        """
        # The index first: words of zero at the end do not count, nor would index 0 behind a seed of two words.
        uniform = np.random.default_rng((index or 0, self.seed)).random(self.seq_length + 1)
        ids = torch.from_numpy((self.vocab_size * uniform**4).astype(np.int64))
        loss_mask = torch.full((self.seq_length,), float(index is not None))
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": loss_mask}


Samples = EpochedDataset | BlendedDataset | MockSamples


def build_datasets(
    config: DataConfig, seq_length: int, seed: int, tokenizer: "Tokenizer | MockTokenizer"
) -> tuple[Samples, Samples | None, Samples | None]:
    """Build the training, validation and test samples of `config.data_path`; None for a split whose share is 0.

    With ``mock_data`` all three are drawn, whatever the shares.

    Sample n is a pure function of (files, split, seq_length, seed, n): a dict of `tokens` and `labels`, int64
    [seq_length], labels already shifted, `loss_mask`, float32 [seq_length], and, if documents are told apart,
    `starts`, bool [seq_length].

    Collective over all ranks if a process group is initialised: rank 0 checks the files and writes the index caches,
    the others map them. A failure on one rank raises on all. Raises DataError: a bad file (`check_indexed`), a split
    without a single sample, or a cache that cannot be written.
    """
    import torch.distributed as dist

    from runtime.together import raise_together

    if seq_length < 1 or not 0 <= seed < 1 << 32:
        raise DataError(f"seq_length is {seq_length} and seed {seed}; they must be at least 1 and in [0, 2^32)")
    if isinstance(tokenizer, MockTokenizer):
        drawn = [MockSamples(seq_length, tokenizer.vocab_size, seed + (part << 32)) for part in range(3)]
        return drawn[0], drawn[1], drawn[2]
    prefixes, weights = blend(config.data_path)
    first = not dist.is_initialized() or dist.get_rank() == 0
    with raise_together():
        megatron_core()  # takes seconds: import on all ranks at once, not in turns
    splits: list[list[EpochedDataset | None]] = []
    # Rank 0 scans the files and writes first; the others map only finished files.
    for turn in (first, not first):
        with raise_together():
            if turn:
                splits = [_splits(config, prefix, seq_length, seed, tokenizer, first) for prefix in prefixes]
    train, valid, test = (_join(list(parts), weights) for parts in zip(*splits, strict=True))
    if train is None:
        raise DataError(f'split is "{config.split}" and leaves nothing to train on; make its first share larger than 0')
    return train, valid, test


def _join(parts: list[EpochedDataset | None], weights: list[float] | None) -> Samples | None:
    present = [part for part in parts if part is not None]
    if len(present) > 1:
        return BlendedDataset(present, weights or [len(part) for part in present])
    return present[0] if present else None


def _splits(
    config: DataConfig, prefix: str, seq_length: int, seed: int, tokenizer: "Tokenizer", check: bool
) -> list[EpochedDataset | None]:
    """Return an endless dataset per split of a prefix, None where the share is 0."""
    if config.sft:
        return conversation_splits(prefix, tokenizer, split_shares(config.split), seq_length, seed, check)
    if os.path.exists(f"{prefix}{LOSS_MASK}.idx"):
        raise DataError(
            f"{prefix} holds conversations, of which not all is learned ({prefix}{LOSS_MASK}.idx); give --sft "
            "--reset-attention-mask --reset-position-ids"
        )
    return _Source(config, prefix, seq_length, seed, tokenizer, check).splits()


class _Source:
    """The files of one prefix, GPTDataset's configuration and index cache for them, and the splits."""

    def __init__(
        self, config: DataConfig, prefix: str, seq_length: int, seed: int, tokenizer: "Tokenizer", check: bool
    ) -> None:
        # Absolute: GPTDataset names caches by the path as given.
        self.prefix = os.path.abspath(prefix)
        self.config, self.seq_length, self.seed, self.tokenizer = config, seq_length, seed, tokenizer
        self.indexed: Indexed = check_indexed(self.prefix, tokenizer.vocab_size) if check else open_indexed(self.prefix)
        if check:
            self.indexed.check_tokenizer(tokenizer.path, tokenizer.sha256)
        self.dataset = megatron_core().IndexedDataset(self.prefix, mmap=False)
        self.reader = self.dataset.bin_reader = TokenReader(self.prefix)
        self.writes = check
        self.wanted = [index for index, share in enumerate(split_shares(config.split)) if share > 0]

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
            eod_mask_loss=self.config.eod_mask_loss,
            create_attention_mask=False,
        )

    def splits(self) -> list[EpochedDataset | None]:
        """Return an endless dataset per split, None where the share is 0."""
        for index in self.wanted:
            begin, end = self.documents(index)
            tokens = int(self.indexed.lengths[begin:end].sum(dtype="int64"))
            if tokens < self.seq_length + 1:
                raise DataError(
                    f'{self.prefix}: split "{self.config.split}" leaves the {SPLITS[index]} split {end - begin} '
                    f"documents with {tokens} tokens, but one sample takes seq_length + 1 = {self.seq_length + 1}; "
                    "documents are what is shared out: give it a larger share (or 0, with --eval-iters 0), more "
                    "documents, or a smaller seq_length"
                )
        cache = self.cache()
        return [self.endless(index, cache) if index in self.wanted else None for index in range(len(SPLITS))]

    def endless(self, index: int, cache: str) -> EpochedDataset:
        try:
            first = self.gpt_dataset(index, 0, cache)
        except (OSError, EOFError, ValueError) as error:
            raise DataError(
                f"the index cache {cache} cannot be read ({error}); if it is damaged, remove it, and if another "
                f"machine wrote it, give --data-cache-path a folder that all machines share"
            ) from error
        # Each reader builds later epochs' indices in memory, possibly a worker process in mid-run, where no collective
        # and no write can happen. It takes about a second per 10 million documents.
        return EpochedDataset(
            first,
            lambda epoch: self.gpt_dataset(index, epoch, ""),
            name=f"{self.prefix}.bin",
            vocab_size=self.tokenizer.vocab_size,
            masked_input=self.tokenizer.eod if self.config.eod_mask_loss else None,
            eod=self.tokenizer.eod if self.config.tells_documents else None,
            check=self.reader.check,
        )

    def documents(self, index: int) -> tuple[int, int]:
        """Return a split's range of documents [begin, end), rounded as BlendedMegatronDatasetBuilder does."""
        begin, end = self.gpt_config(0, "").split_matrix[index]
        return round(begin * len(self.indexed.lengths)), round(end * len(self.indexed.lengths))

    def gpt_dataset(self, index: int, epoch: int, cache: str) -> "GPTDataset":
        """Build one epoch of a split; an empty `cache` keeps its indices in memory."""
        megatron, documents = megatron_core(), np.arange(*self.documents(index), dtype=np.int32)
        return megatron.GPTDataset(
            self.dataset, self.prefix, documents, None, megatron.Split(index), self.gpt_config(epoch, cache)
        )

    def cache(self) -> str:
        """Return the folder of the first epoch's indices, written by rank 0 if missing.

        GPTDataset's own cache names ignore the data: a corpus rewritten at the same path would be cut by the old
        indices, and a cache half-written by a killed run would pass for whole. Hence one folder per content, put in
        place by one rename.
        """
        key = {
            "idx": self.indexed.digest(),
            "prefix": self.prefix,
            "tokenizer": self.tokenizer.unique_identifiers,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "split": self.config.split,
            "megatron": megatron_core().version,
            "digests": 1,
        }
        root = Path(self.config.data_cache_path or os.path.join(self.prefix, "cache"))
        folder = root.absolute() / sha256(json.dumps(key, sort_keys=True))[:24]
        if not folder.is_dir() and self.writes:
            self.write_cache(folder)
        for path in folder.glob("*.npy"):
            with path.open("rb") as file:
                # numpy reads any other file as a pickle, and GPTDataset allows it to execute code
                if file.read(6) != b"\x93NUMPY":
                    raise DataError(f"{path} is not a numpy array; remove {folder}, which is then written anew")
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
                    for index in self.wanted:
                        self.gpt_dataset(index, 0, str(draft))
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
    """Import the parts of megatron.core used here, without its warnings; late, since it takes seconds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
        from megatron.core import __version__
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
        from megatron.core.datasets.utils import Split

    # It warns that each later epoch's indices are not saved, which is intended.
    logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)
    return SimpleNamespace(
        version=__version__,
        GPTDataset=GPTDataset,
        GPTDatasetConfig=GPTDatasetConfig,
        IndexedDataset=IndexedDataset,
        IndexedDatasetBuilder=IndexedDatasetBuilder,
        Split=Split,
    )
