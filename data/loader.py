"""Build the batches of each data-parallel rank. Legend: B micro-batch size, S sequence length.

A step's samples depend only on the number of samples consumed before it. There is no iterator state
to save, and neither the number of ranks nor the micro-batch size changes the order, so a checkpoint
resumes on any mesh with the samples that the first run would have read next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from runtime.errors import DataError
from runtime.signals import end_readers_at_exit, leave_to_parent

IGNORE_INDEX = -100
"""Label of a position without loss."""

Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """Dataset whose items are dicts of tensors; index None gives a filler sample without loss.

    Text samples hold `tokens`, `labels` (int64 [S]) and `loss_mask` ([S]), which batching applies
    to the labels, and may hold `starts` (bool [S], the first tokens of documents). Other samples
    are stacked as they are.
    """

    def __len__(self) -> int:
        """Return the number of samples before any repeats."""

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return one sample."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Sizes that split a global batch over ranks and micro-batches, and settings for reading it."""

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    num_workers: int = 0
    """Number of processes that read batches ahead; 0 reads in this process."""
    pin_memory: bool = False
    """Page-lock the tensors, for non-blocking copies to a GPU."""

    def __post_init__(self) -> None:
        if (
            min(self.global_batch_size, self.micro_batch_size) < 1
            or self.global_batch_size % self.together
        ):
            raise DataError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} x data-parallel size {self.dp_size}; change one of them"
            )

    @property
    def together(self) -> int:
        """Number of samples that all ranks together process in one micro-batch."""
        return self.micro_batch_size * self.dp_size


def batches(dataset: Samples, batching: Batching, consumed_samples: int) -> Iterator[list[Batch]]:
    """Yield an endless sequence of steps, each a list of this rank's micro-batches.

    A micro-batch holds `tokens` and `labels`, int64 [B, S], and `starts`, bool [B, S], if the
    samples mark where documents start. The micro-batches of all ranks in a step are exactly the
    samples [consumed, consumed + global_batch_size) of an endless dataset; then `consumed` grows by
    global_batch_size. Labels without loss are IGNORE_INDEX.

    Raises DataError when a bad sample is reached.
    """
    return _steps(dataset, batching, count(consumed_samples))


def evaluation_batches(dataset: Samples, batching: Batching, samples: int) -> Iterator[list[Batch]]:
    """Yield steps like `batches`, over the samples [0, min(samples, len(dataset))), each once.

    The last step is padded with samples whose labels are all IGNORE_INDEX, so every rank has the
    same number of steps and micro-batches; a loss summed over ranks and divided by the number of
    valid labels is exact.
    """
    indices: list[int | None] = list(range(min(samples, len(dataset))))
    indices += [None] * (-len(indices) % batching.global_batch_size)
    return _steps(dataset, batching, iter(indices))


def _steps(
    dataset: Samples, batching: Batching, indices: Iterator[int | None]
) -> Iterator[list[Batch]]:
    if batching.num_workers:
        end_readers_at_exit()
    loader: DataLoader[Any] = DataLoader(
        _Reader(dataset),  # type: ignore[arg-type]
        batch_sampler=_micro_batches(batching, indices),
        collate_fn=_collate,
        num_workers=batching.num_workers,
        pin_memory=batching.pin_memory,
        # The loader draws a seed for its workers, which must not advance the RNG of training.
        generator=torch.Generator(),
        worker_init_fn=leave_to_parent,
    )
    reader = iter(loader)
    try:
        while step := list(islice(reader, batching.global_batch_size // batching.together)):
            for batch in step:
                if isinstance(batch, DataError):
                    raise batch
            yield step
    finally:
        del reader  # otherwise an error's traceback would keep the reader's processes alive


def _micro_batches(batching: Batching, indices: Iterator[int | None]) -> Iterator[list[int | None]]:
    """Yield the sample indices of this rank's micro-batches: every dp_size-th, as in Megatron."""
    begin = batching.dp_rank * batching.micro_batch_size
    while group := list(islice(indices, batching.together)):
        yield group[begin : begin + batching.micro_batch_size]


class _Reader:
    """Dataset that returns a DataError instead of raising it.

    A DataError raised in a worker would arrive with a traceback as its message.
    """

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
    batch = {name: torch.stack([sample[name] for sample in good]) for name in good[0]}  # [B, S]
    if "loss_mask" in batch:
        batch["labels"] = batch["labels"].masked_fill(batch.pop("loss_mask") == 0, IGNORE_INDEX)
    return batch
