"""Batches of each data-parallel rank. Legend: B micro-batch size, S sequence length.

Which samples a step holds depends on the number of samples consumed before it alone: there is no iterator state to
save, and neither the number of ranks nor the micro-batch size changes the order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from data.errors import DataError

IGNORE_INDEX = -100
"""Label that carries no loss."""

Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """Dataset of dicts of tensors; item None is a filler without loss.

    Of a language they are `tokens`, `labels` (int64 [S]) and `loss_mask` ([S]), which batches have in their labels.
    Others come in batches as they are.
    """

    def __len__(self) -> int:
        """Samples before any repeats."""

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """One sample."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How data-parallel ranks share out a global batch, cut it into micro-batches and read it."""

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    num_workers: int = 0
    """Processes that read ahead; 0 reads here."""
    pin_memory: bool = False
    """Page-lock the tensors, for copies to a GPU that do not block."""

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.micro_batch_size) < 1 or self.global_batch_size % self.together:
            raise DataError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} x data-parallel size {self.dp_size}; change one of them"
            )

    @property
    def together(self) -> int:
        """Samples that all ranks' micro-batches of one turn hold."""
        return self.micro_batch_size * self.dp_size


def batches(dataset: Samples, batching: Batching, consumed_samples: int) -> Iterator[list[Batch]]:
    """Endless steps, each this rank's micro-batches: dicts of `tokens` and `labels`, int64 [B, S].

    The ranks' micro-batches of a step together are exactly the samples [consumed, consumed + global_batch_size), then
    `consumed` moves on by as many. Labels without loss are IGNORE_INDEX.

    Args:
        dataset: endless, as `data.text.megatron.build_datasets` gives it.
        consumed_samples: samples of all ranks before this step.

    Raises:
        DataError: when reached, for a bad sample.
    """
    return _steps(dataset, batching, count(consumed_samples))


def evaluation_batches(dataset: Samples, batching: Batching, samples: int) -> Iterator[list[Batch]]:
    """As `batches`, but the samples [0, min(samples, len(dataset))), each once.

    The last step is filled up with samples whose labels are all IGNORE_INDEX, so that every rank makes the same number
    of steps and of micro-batches; a loss summed over all ranks and divided by the number of labels left is exact.
    """
    wanted: list[int | None] = list(range(min(samples, len(dataset))))
    wanted += [None] * (-len(wanted) % batching.global_batch_size)
    return _steps(dataset, batching, iter(wanted))


def _steps(dataset: Samples, batching: Batching, indices: Iterator[int | None]) -> Iterator[list[Batch]]:
    loader: DataLoader[Any] = DataLoader(
        _Reader(dataset),  # type: ignore[arg-type]
        batch_sampler=_micro_batches(batching, indices),
        collate_fn=_collate,
        num_workers=batching.num_workers,
        pin_memory=batching.pin_memory,
        # Its own generator: the loader draws a seed for its workers, which must not move the training's random state.
        generator=torch.Generator(),
    )
    reader = iter(loader)
    while step := list(islice(reader, batching.global_batch_size // batching.together)):
        for batch in step:
            if isinstance(batch, DataError):
                raise batch
        yield step


def _micro_batches(batching: Batching, indices: Iterator[int | None]) -> Iterator[list[int | None]]:
    """This rank's indices by micro-batch: as in Megatron, rank r takes the r-th of every dp_size micro-batches."""
    begin = batching.dp_rank * batching.micro_batch_size
    while together := list(islice(indices, batching.together)):
        yield together[begin : begin + batching.micro_batch_size]


class _Reader:
    """Hands a DataError over as a value: raised in a worker, it would arrive with a traceback as its text."""

    def __init__(self, dataset: Samples) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int | None) -> Batch | DataError:
        try:
            return self._dataset[index]
        except DataError as error:
            return error


def _collate(samples: list[Batch | DataError]) -> Batch | DataError:
    good: list[Batch] = []
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
        good.append(sample)
    if "loss_mask" not in good[0]:
        return {name: torch.stack([sample[name] for sample in good]) for name in good[0]}
    tokens, labels, loss_mask = (torch.stack([sample[k] for sample in good]) for k in ("tokens", "labels", "loss_mask"))
    return {"tokens": tokens, "labels": labels.masked_fill(loss_mask == 0, IGNORE_INDEX)}  # [B, S]
