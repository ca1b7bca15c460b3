"""Endless datasets whose sample n depends only on n: epochs, blends of files, random tokens.

Resuming relies on this. A checkpoint contains the number of consumed samples and no iterator state,
and a resumed run reads the samples from that number on: on another number of ranks, with another
micro-batch size or other workers, it gets the samples that the first run would have read. So no
dataset here may count its calls or advance a generator.

Samples may mark where documents begin (data/text/documents.py). A sample has S tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import torch

from data.loader import Samples
from runtime.errors import DataError

# Period of a blend's interleaving: weights are rounded to multiples of 1/65536, at least one.
_PERIOD = 1 << 16


@dataclass(eq=False)
class EpochedDataset:
    """A dataset of endless epochs: sample n is sample n mod len of epoch n // len.

    Each epoch has every token once, in a different order. Megatron builds one index over all
    epochs of a run instead, so its order depends on the run's length: a run that is extended
    would then see other samples.
    """

    first: Samples
    """Epoch 0, a dataset with each sample once, such as Megatron's GPTDataset."""
    build: Callable[[int], Samples]
    """Returns epoch e, a dataset as long as ``first``."""
    _: KW_ONLY
    name: str
    """Name of the file, for error messages."""
    vocab_size: int
    """Token ids must be in [0, vocab_size)."""
    missing: Callable[[int], str | None] = lambda token: None
    """Returns a message for a token id that the tokenizer has and the model lacks, else None."""
    eod_mask_loss: bool = False
    """Mask the loss of labels that begin another document; samples must have `begins`."""
    tells_documents: bool = False
    """Add `starts`, a mask of the documents' first tokens, to the samples; needs `begins`."""
    check: Callable[[], None] = lambda: None
    """Called before each sample; raises DataError if the files have changed."""
    share: float = 1.0
    """Share of the file's training tokens that comes from this dataset."""
    fill: float = 1.0
    """Share of the samples' positions that have tokens; the rest is padding."""

    def __post_init__(self) -> None:
        self._epochs = {0: self.first}

    def __len__(self) -> int:
        """Return the number of samples of one epoch."""
        return len(self.first)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return sample `index` >= 0, or a filler without loss for None.

        It holds `tokens`, `labels`, `loss_mask` and, with `tells_documents`, `starts`, each [S].
        Raises DataError, naming the file, if a token id is outside the vocabulary, the file has
        changed, or the cache of sample indices is damaged.
        """
        epoch = 0
        within_epoch = None
        if index is not None:
            epoch, within_epoch = divmod(index, len(self))
        self.check()
        try:
            sample = self._epoch(epoch)[within_epoch]
        except (IndexError, OverflowError) as error:
            raise DataError(
                f"{self.name}: sample {index} cannot be read ({error}), because the cached sample "
                "indices are damaged; remove their folder (--data-cache-path, by default "
                "PREFIX/cache next to the data), and the next run writes it again"
            ) from error

        tokens = sample["tokens"]
        labels = sample["labels"]
        loss_mask = sample["loss_mask"]
        self._check_ids(index, tokens)
        self._check_ids(index, labels)
        if "starts" in sample:  # packed samples mask their own labels
            return sample

        if index is not None and (num_masked := int((loss_mask == 0).sum())):
            # GPTDataset masks labels equal to its pad id, -1, and hides them.
            raise DataError(
                f"{self.name}: sample {index} holds token id -1, which is not a token, at "
                f"{num_masked} positions; write the file again"
            )
        finished = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.eod_mask_loss:
            finished["loss_mask"] = loss_mask.masked_fill(sample["begins"][1:], 0.0)
        if self.tells_documents:
            finished["starts"] = sample["begins"][:-1].clone()
        return finished

    def _check_ids(self, index: int | None, ids: torch.Tensor) -> None:
        """Raise DataError if a token id is outside the vocabulary."""
        lowest, highest = ids.aminmax()
        if lowest >= 0 and highest < self.vocab_size:
            return
        token = int(lowest if lowest < 0 else highest)
        message = self.missing(token)
        if message is not None:
            raise DataError(f"{self.name}: sample {index}: {message}")
        raise DataError(
            f"{self.name}: sample {index} holds token id {token}, but the vocabulary has "
            f"{self.vocab_size} entries; give --tokenizer-model the tokenizer that wrote the file, "
            "or write the file again"
        )

    def _epoch(self, epoch: int) -> Samples:
        if epoch not in self._epochs:
            # Samples are read in order: keep only epoch 0 for fillers and the previous epoch, which
            # is still in use at the boundary.
            for old_epoch in list(self._epochs):
                if old_epoch not in (0, epoch - 1):
                    del self._epochs[old_epoch]
            self._epochs[epoch] = self.build(epoch)
        return self._epochs[epoch]


class BlendedDataset:
    """Interleave endless datasets by weight; each keeps the order of its samples.

    A blend has a fixed period of 65,536 samples instead of random draws: a sample's dataset and its
    number there follow from its index by arithmetic, and the shares are exact in every period. In a
    period, dataset i has round(65536 * weight_i) samples, spread evenly, if no dataset is padded.
    Weights are shares of tokens, so a dataset with more padding has more samples.

    Args:
        datasets: the datasets to blend.
        weights: one weight above 0 per dataset; they need not sum to 1.
    """

    def __init__(self, datasets: Sequence[EpochedDataset], weights: Sequence[float]) -> None:
        self._datasets = list(datasets)
        fills = np.array([dataset.fill for dataset in self._datasets])
        sample_weights = np.asarray(weights, dtype=np.float64) / fills
        exact = sample_weights / sample_weights.sum() * _PERIOD
        self._counts = _rounded(exact)
        self.fill = float(self._counts @ fills) / _PERIOD
        """Share of positions that have tokens, over all datasets."""

        owners = np.repeat(np.arange(len(self._counts)), self._counts)
        ranks = np.concatenate([np.arange(count) for count in self._counts])
        order = np.argsort((ranks + 0.5) / self._counts[owners], kind="stable")
        self._owners = owners[order]  # [_PERIOD]
        self._ranks = ranks[order]  # [_PERIOD]: number of earlier samples of its dataset

    def locate(self, index: int) -> tuple[int, int]:
        """Return the dataset of sample `index` and the sample's number in it."""
        period, within_period = divmod(index, _PERIOD)
        owner = int(self._owners[within_period])
        return owner, period * int(self._counts[owner]) + int(self._ranks[within_period])

    def __len__(self) -> int:
        """Return the number of samples before any dataset starts its second epoch."""
        ends = []
        for owner, dataset in enumerate(self._datasets):
            periods, rank = divmod(len(dataset), int(self._counts[owner]))
            positions = np.flatnonzero(self._owners == owner)
            ends.append(periods * _PERIOD + int(positions[rank]))
        return min(ends)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return a sample as `EpochedDataset` does."""
        if index is None:
            return self._datasets[0][None]
        owner, number = self.locate(index)
        return self._datasets[owner][number]


def _rounded(exact: np.ndarray) -> np.ndarray:
    """Round counts to integers of at least 1 that sum to the period (largest remainders)."""
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := _PERIOD - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        gains = np.where(counts + step >= 1, step * (exact - counts), -np.inf)
        counts[np.argmax(gains)] += step
    return counts


@dataclass(frozen=True)
class MockTokenizer:
    """Stands in for a run's tokenizer with ``--mock-data``."""

    vocab_size: int


@dataclass(frozen=True)
class MockSamples:
    """Endless samples of ``seq_length`` random tokens.

    Small ids are more frequent, so that there is something to learn and the loss falls.
    """

    seq_length: int
    vocab_size: int
    seed: int
    fill: ClassVar[float] = 1.0
    """Share of positions that have tokens; there is no padding here."""

    def __len__(self) -> int:
        """Return the number of samples of an epoch, which only progress lines use."""
        return 1 << 20

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return sample ``index``, or a filler without loss for None.

        ``tokens`` and ``labels`` are int64, ``loss_mask`` is float32, each [S].
        """
        # The index comes first: trailing zero words do not change a seed, so index 0 would not
        # count after a seed of two words.
        uniform = np.random.default_rng((index or 0, self.seed)).random(self.seq_length + 1)
        ids = torch.from_numpy((self.vocab_size * uniform**4).astype(np.int64))
        loss_mask = torch.full((self.seq_length,), float(index is not None))
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": loss_mask}


def positions_in_documents(starts: torch.Tensor) -> torch.Tensor:
    """Number the tokens of each document from 0: int64 [..., S], given ``starts`` [..., S].

    The result equals the position ids of Megatron's ``_get_ltor_masks_and_position_ids`` with
    reset_position_ids.
    """
    position_ids = starts.new_ones(starts.shape).cumsum(-1) - 1
    # The running maximum of the documents' first positions is where the current one began.
    return position_ids - (position_ids * starts).cummax(-1).values


def cumulative_lengths(starts: torch.Tensor) -> tuple[int, ...]:
    """Return cu_seqlens (0, l1, ..., S) of the documents in ``starts`` [S], with starts[0] set."""
    return *starts.nonzero().flatten().tolist(), len(starts)
