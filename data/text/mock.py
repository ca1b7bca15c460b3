"""Samples that are drawn from the seed, for `--mock-data`."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch


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
    fill: ClassVar[float] = 1.0
    """As of other datasets: there is no padding."""

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
