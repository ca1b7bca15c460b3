"""Endless datasets whose sample n is a pure function of n: epochs of a file, a blend of files,
drawn tokens.

Samples may tell where documents begin (data/text/documents.py). S tokens of a sample.
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
    """Endless epochs: sample n is number n mod len of epoch n // len; each epoch has every token
    once, reshuffled.

    Megatron builds one index over all epochs of a run, so that its order depends on the run's
    length.
    """

    first: Samples
    """Epoch 0: each of its samples once, such as Megatron's GPTDataset."""
    build: Callable[[int], Samples]
    """Returns epoch e, a dataset as long as ``first``."""
    _: KW_ONLY
    name: str
    """File named in messages."""
    vocab_size: int
    """Token ids must be in [0, vocab_size)."""
    missing: Callable[[int], str | None] = lambda token: None
    """As of `check_indexed`."""
    eod_mask_loss: bool = False
    """Mask the loss of a label that begins another document; samples of the dataset have `begins`.
    """
    tells_documents: bool = False
    """Samples tell where documents start; those of the dataset have `begins`."""
    check: Callable[[], None] = lambda: None
    """Called before each sample; raises DataError if the files have changed."""
    share: float = 1.0
    """Share of the tokens that are drawn from its file."""
    fill: float = 1.0
    """Share of the places of samples that hold tokens; the rest is padding."""

    def __post_init__(self) -> None:
        self._epochs = {0: self.first}

    def __len__(self) -> int:
        """Return the samples of one epoch."""
        return len(self.first)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return sample `index` >= 0, or for None a filler of the same shape with all loss masked.

        It holds `tokens`, `labels`, `loss_mask` and, with `tells_documents`, `starts`, each [S].
        Raises DataError: a token id outside the vocabulary, or a changed file; names the file and
        the sample.
        """
        epoch, within = (0, None) if index is None else divmod(index, len(self))
        self.check()
        try:
            sample = self._epoch(epoch)[within]
        except (IndexError, OverflowError) as error:
            raise DataError(
                f"{self.name}: sample {index} is not in the file ({error}); its cache of sample indices is damaged: "
                "remove it, and it is written anew"
            ) from error
        tokens, labels, loss_mask = sample["tokens"], sample["labels"], sample["loss_mask"]
        for ids in (tokens, labels):
            lowest, highest = ids.aminmax()
            if lowest < 0 or highest >= self.vocab_size:
                worst = int(lowest if lowest < 0 else highest)
                if (lacking := self.missing(worst)) is not None:
                    raise DataError(f"{self.name}: sample {index}: {lacking}")
                raise DataError(
                    f"{self.name}: sample {index} holds token id {worst}, but the vocabulary has {self.vocab_size} "
                    f"entries; give --tokenizer-model the tokenizer that wrote the file, or write the file again"
                )
        if "starts" in sample:
            return sample
        if index is not None and (lost := int((loss_mask == 0).sum())):
            # GPTDataset masks labels equal to its pad id, -1, and hides them.
            raise DataError(
                f"{self.name}: sample {index} holds token id -1 in {lost} places; write the file again"
            )

        finished = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if self.eod_mask_loss:
            finished["loss_mask"] = loss_mask.masked_fill(sample["begins"][1:], 0.0)
        if self.tells_documents:
            finished["starts"] = sample["begins"][:-1].clone()
        return finished

    def _epoch(self, epoch: int) -> Samples:
        if epoch not in self._epochs:
            # Reading goes forward: keep epoch 0 for fillers, and the previous one, in use at the
            # boundary.
            self._epochs = {
                e: dataset for e, dataset in self._epochs.items() if e in (0, epoch - 1)
            }
            self._epochs[epoch] = self.build(epoch)
        return self._epochs[epoch]


class BlendedDataset:
    """Interleave endless datasets by weight; each keeps the order of its samples.

    In each period of 65,536 samples, dataset i comes round(65536 * weight_i) times, spread evenly,
    if none is padded; padded ones come more often, so that their tokens are as the weights say.

    Args:
        datasets: the datasets to blend.
        weights: each above 0, of any sum.
    """

    def __init__(self, datasets: Sequence[EpochedDataset], weights: Sequence[float]) -> None:
        self._datasets = list(datasets)
        fills = np.array([dataset.fill for dataset in self._datasets])
        wanted = np.asarray(weights, dtype=np.float64) / fills
        exact = wanted / wanted.sum() * _PERIOD
        self._counts = np.maximum(np.floor(exact).astype(np.int64), 1)
        while (missing := _PERIOD - int(self._counts.sum())) != 0:  # by largest remainders
            step = 1 if missing > 0 else -1
            self._counts[
                np.argmax(
                    np.where(self._counts + step >= 1, step * (exact - self._counts), -np.inf)
                )
            ] += step
        self.fill = float(self._counts @ fills) / _PERIOD
        """As a dataset's."""
        owners = np.repeat(np.arange(len(self._counts)), self._counts)
        ranks = np.concatenate([np.arange(count) for count in self._counts])
        order = np.argsort((ranks + 0.5) / self._counts[owners], kind="stable")
        self._owners, self._ranks = owners[order], ranks[order]  # [_PERIOD] each

    def locate(self, index: int) -> tuple[int, int]:
        """Return the dataset of sample `index` and its number there."""
        period, within = divmod(index, _PERIOD)
        owner = int(self._owners[within])
        return owner, period * int(self._counts[owner]) + int(self._ranks[within])

    def __len__(self) -> int:
        """Return the samples before any dataset starts its second epoch."""
        ends = []
        for owner, dataset in enumerate(self._datasets):
            periods, rank = divmod(len(dataset), int(self._counts[owner]))
            ends.append(periods * _PERIOD + int(np.flatnonzero(self._owners == owner)[rank]))
        return min(ends)

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return a sample as `EpochedDataset` does."""
        if index is None:
            return self._datasets[0][None]
        owner, number = self.locate(index)
        return self._datasets[owner][number]


@dataclass(frozen=True)
class MockTokenizer:
    """Stands where a run's tokenizer would, for ``--mock-data``."""

    vocab_size: int


@dataclass(frozen=True)
class MockSamples:
    """Endless samples of ``seq_length`` tokens; small ids are frequent, so that there is something
    to learn.
    """

    seq_length: int
    vocab_size: int
    seed: int
    fill: ClassVar[float] = 1.0
    """As of other datasets: there is no padding."""

    def __len__(self) -> int:
        """Return the samples of an epoch, which is said in progress lines alone."""
        return 1 << 20

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return sample ``index``, a function of the seed and the index, or for None a filler
        without loss.

        ``tokens`` and ``labels`` are int64, ``loss_mask`` is float32, each [S].
        """
        # The index first: words of zero at the end do not count, nor would index 0 behind a seed of
        # two words.
        uniform = np.random.default_rng((index or 0, self.seed)).random(self.seq_length + 1)
        ids = torch.from_numpy((self.vocab_size * uniform**4).astype(np.int64))
        loss_mask = torch.full((self.seq_length,), float(index is not None))
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": loss_mask}


def positions_in_documents(starts: torch.Tensor) -> torch.Tensor:
    """Count each token's place in its document from 0, given ``starts`` [..., S]: int64 [..., S].

    Equal to the position ids of Megatron's ``_get_ltor_masks_and_position_ids`` with
    reset_position_ids.
    """
    places = starts.new_ones(starts.shape).cumsum(-1) - 1
    return places - (places * starts).cummax(-1).values


def cumulative_lengths(starts: torch.Tensor) -> tuple[int, ...]:
    """Return the cumulative lengths of the documents of ``starts`` [S], of which the first is set:
    (0, l1, ..., S).
    """
    return *starts.nonzero().flatten().tolist(), len(starts)
