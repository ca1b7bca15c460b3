"""Interface of a training objective: sharded batches, their loss and its name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from data.loader import Batch


class Objective(ABC):
    """Shards a batch over ranks and computes its loss, without knowing the training loop.

    A loss is returned as a sum over this rank's tokens, because the mean over all ranks needs the
    global token count, which is known only when all ranks have their batches.
    """

    loss_name: ClassVar[str]
    """Name of the training loss in records, one of ``train.callbacks.metrics.LOSSES``."""
    unit: ClassVar[str]
    """Unit of the rate in progress lines; in records the rate is called ``UNIT_per_second``."""

    @abstractmethod
    def local(self, batch: Batch) -> Batch:
        """Return this rank's shard of a batch, on its device.

        Its ``count`` is the number of tokens with a loss in the shard, int64 [1] on the CPU, so
        that reading it does not wait for the device.
        """

    @abstractmethod
    def lengths(self, local: Batch) -> Sequence[int]:
        """Return the full lengths of a shard's documents, or of its samples, for FLOP counts."""

    @abstractmethod
    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum of a shard's losses, float32 (a ``parallel.data.LossSum`` function)."""

    def validation_line(self, record: dict[str, Any]) -> str:
        """Describe a record's validation in one line."""
        return (
            f"validation loss at iteration {record['iteration']}: {record['validation_loss']:.4f}"
        )

    # The methods below are for pipelines, and for runs without data.

    @abstractmethod
    def blank(self, micro_batch_size: int) -> Batch:
        """Return a micro-batch of zeros in the data's format; each sample is one document."""

    @abstractmethod
    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Return the key of the first stage's input in a shard, and a meta tensor of its shape."""

    @abstractmethod
    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Return the stages that hold each shared parameter, keyed by the parameter's name.

        ``part`` is any stage's part of the model, and ``stages`` the number of stages.
        """
