"""Batches of each data-parallel rank. Legend: B micro-batch size, S sequence length.

Which samples a step holds depends on the number of samples consumed before it alone: there is no iterator state to
save, and neither the number of ranks nor the micro-batch size changes the order.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from data.indexed import DataError

IGNORE_INDEX = -100
"""Label that carries no loss."""

Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """Dataset of `tokens`, `labels` (int64 [S]) and `loss_mask` ([S]); item None is a filler without loss."""

    def __len__(self) -> int:
        """Samples before any repeats."""

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """One sample."""


def batches(
    dataset: Samples,
    *,
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[list[Batch]]:
    """Endless steps, each this rank's micro-batches: dicts of `tokens` and `labels`, int64 [B, S].

    The ranks' micro-batches of a step together are exactly the samples [consumed, consumed + global_batch_size), then
    `consumed` moves on by as many. Labels without loss are IGNORE_INDEX.

    Args:
        dataset: endless, as `data.megatron.build_datasets` gives it.
        consumed_samples: samples of all ranks before this step.
        num_workers: processes that read ahead; 0 reads here.
        pin_memory: page-lock the tensors, for copies to a GPU that do not block.

    Raises:
        DataError: at once if global_batch_size cannot be shared out; when reached, for a bad sample.
    """
    _check_sizes(global_batch_size, micro_batch_size, dp_size)
    indices = count(consumed_samples)
    return _steps(dataset, indices, global_batch_size, micro_batch_size, dp_rank, dp_size, num_workers, pin_memory)


def evaluation_batches(
    dataset: Samples,
    *,
    samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[list[Batch]]:
    """As `batches`, but the samples [0, min(samples, len(dataset))), each once.

    The last step is filled up with samples whose labels are all IGNORE_INDEX, so that every rank makes the same number
    of steps and of micro-batches; a loss summed over all ranks and divided by the number of labels left is exact.
    """
    _check_sizes(global_batch_size, micro_batch_size, dp_size)
    wanted: list[int | None] = list(range(min(samples, len(dataset))))
    wanted += [None] * (-len(wanted) % global_batch_size)
    indices = iter(wanted)
    return _steps(dataset, indices, global_batch_size, micro_batch_size, dp_rank, dp_size, num_workers, pin_memory)


def _check_sizes(global_batch_size: int, micro_batch_size: int, dp_size: int) -> None:
    if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (micro_batch_size * dp_size):
        raise DataError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x "
            f"data-parallel size {dp_size}; change one of them"
        )


def _steps(
    dataset: Samples,
    indices: Iterator[int | None],
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int,
    pin_memory: bool,
) -> Iterator[list[Batch]]:
    loader: DataLoader[Any] = DataLoader(
        _Reader(dataset),  # type: ignore[arg-type]
        batch_sampler=_micro_batches(indices, micro_batch_size, dp_rank, dp_size),
        collate_fn=_collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # Its own generator: the loader draws a seed for its workers, which must not move the training's random state.
        generator=torch.Generator(),
    )
    per_step = global_batch_size // (micro_batch_size * dp_size)
    reader = iter(loader)
    while step := list(islice(reader, per_step)):
        for batch in step:
            if isinstance(batch, DataError):
                raise batch
        yield step


def _micro_batches(
    indices: Iterator[int | None], micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[list[int | None]]:
    """This rank's indices by micro-batch: as in Megatron, rank r takes the r-th of every dp_size micro-batches."""
    while together := list(islice(indices, micro_batch_size * dp_size)):
        yield together[dp_rank * micro_batch_size : (dp_rank + 1) * micro_batch_size]


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
    tokens, labels, loss_mask = (torch.stack([sample[k] for sample in good]) for k in ("tokens", "labels", "loss_mask"))
    return {"tokens": tokens, "labels": labels.masked_fill(loss_mask == 0, IGNORE_INDEX)}  # [B, S]
