"""Endless datasets whose sample n is a pure function of n: one file's epochs, and a weighted blend of several."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from data.errors import DataError

if TYPE_CHECKING:
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset

# A blend repeats its interleaving with this period, so weights are rounded to 1/65536 (and up to one such part).
_PERIOD = 1 << 16


class EpochedDataset:
    """Sample n is number n mod len of epoch n // len; every epoch has each token once, shuffled anew.

    Megatron's own way, one index over all epochs that a run will need, makes the order depend on the run's length.

    Args:
        first: epoch 0.
        build: gives epoch e, a dataset as long as `first`.
        name: file that messages name.
        vocab_size: token ids must be in [0, vocab_size).
        masked_input: token at whose positions the dataset leaves out the loss, if any.
        check: raises DataError where the files are no longer what they were, before each sample.
    """

    def __init__(
        self,
        first: "GPTDataset",
        build: Callable[[int], "GPTDataset"],
        *,
        name: str,
        vocab_size: int,
        masked_input: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._epochs = {0: first}
        self._build = build
        self._length = len(first)
        self._name = name
        self._vocab_size = vocab_size
        self._masked_input, self._check = masked_input, check

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self._length

    def __getitem__(self, index: int | None) -> dict[str, "torch.Tensor"]:
        """Sample `index` >= 0, or for None a filler of the same shape whose loss is masked everywhere.

        Raises:
            DataError: a token id outside the vocabulary, or a file that was changed, naming the file and the sample.
        """
        epoch, within = (0, None) if index is None else divmod(index, self._length)
        self._check()
        try:
            sample = self._epoch(epoch)[within]
        except (IndexError, OverflowError) as error:
            raise DataError(
                f"{self._name}: sample {index} is not in the file ({error}); its cache of sample indices is damaged: "
                "remove it, and it is written anew"
            ) from error
        tokens, labels, loss_mask = sample["tokens"], sample["labels"], sample["loss_mask"]
        for ids in (tokens, labels):
            lowest, highest = ids.aminmax()
            if lowest < 0 or highest >= self._vocab_size:
                worst = int(lowest if lowest < 0 else highest)
                raise DataError(
                    f"{self._name}: sample {index} holds token id {worst}, but the vocabulary has {self._vocab_size} "
                    f"entries; give --tokenizer-model the tokenizer that wrote the file, or write the file again"
                )
        if index is not None:
            # GPTDataset masks labels equal to its pad id, -1, and then hides them: such an id stood in the file.
            meant = 0 if self._masked_input is None else int((tokens == self._masked_input).sum())
            found = int((loss_mask == 0).sum())
            if found != meant:
                raise DataError(
                    f"{self._name}: sample {index} holds token id -1 in {found - meant} places; write the file again"
                )
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}

    def _epoch(self, epoch: int) -> "GPTDataset":
        if epoch not in self._epochs:
            # Reading goes forward: beside the first epoch, which fillers need, only two can be in use at its boundary.
            self._epochs = {e: dataset for e, dataset in self._epochs.items() if e in (0, epoch - 1)}
            self._epochs[epoch] = self._build(epoch)
        return self._epochs[epoch]


class BlendedDataset:
    """Endless datasets interleaved by weight; each gives its own samples in its own order.

    In each period of 65,536 samples, dataset i comes round(65536 * weight_i) times, spread evenly.

    Args:
        datasets: what is blended.
        weights: each above 0; their sum does not matter.
    """

    def __init__(self, datasets: Sequence[EpochedDataset], weights: Sequence[float]) -> None:
        self._datasets = list(datasets)
        self._counts = _shares(np.asarray(weights, dtype=np.float64), _PERIOD)
        owners = np.repeat(np.arange(len(self._counts)), self._counts)
        ranks = np.concatenate([np.arange(count) for count in self._counts])
        order = np.argsort((ranks + 0.5) / self._counts[owners], kind="stable")
        self._owners, self._ranks = owners[order], ranks[order]  # [_PERIOD] each

    def locate(self, index: int) -> tuple[int, int]:
        """Dataset that sample `index` is taken from, and its number there."""
        period, within = divmod(index, _PERIOD)
        owner = int(self._owners[within])
        return owner, period * int(self._counts[owner]) + int(self._ranks[within])

    def __len__(self) -> int:
        """Samples before one of the datasets begins its second epoch."""
        ends = []
        for owner, dataset in enumerate(self._datasets):
            periods, rank = divmod(len(dataset), int(self._counts[owner]))
            ends.append(periods * _PERIOD + int(np.flatnonzero(self._owners == owner)[rank]))
        return min(ends)

    def __getitem__(self, index: int | None) -> dict[str, "torch.Tensor"]:
        """As `EpochedDataset`."""
        if index is None:
            return self._datasets[0][None]
        owner, number = self.locate(index)
        return self._datasets[owner][number]


def _shares(weights: np.ndarray, total: int) -> np.ndarray:
    """Integers of at least 1 in proportion to `weights` that sum to `total`, by largest remainders."""
    exact = weights / weights.sum() * total
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := total - int(counts.sum())) != 0:
        step = 1 if missing > 0 else -1
        counts[np.argmax(np.where(counts + step >= 1, step * (exact - counts), -np.inf))] += step
    return counts
