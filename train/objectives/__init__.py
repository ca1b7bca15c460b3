"""The training objective, as the loop, the runners and the progress lines use it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from data.loader import Batch


class Objective(ABC):
    """The way from a batch to its loss: sharding, loss, and its name in records and progress lines."""

    loss_name: ClassVar[str]
    """A record's field for the training loss, one of ``train.callbacks.metrics.LOSSES``."""
    unit: ClassVar[str]
    """The unit that the rate counts; a record has it as ``UNIT_per_second``."""

    @abstractmethod
    def local(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch, on its device.

        ``count`` in it is the tokens of that part that carry loss, int64 [1] on the CPU, so that
        none waits.
        """

    @abstractmethod
    def lengths(self, local: Batch) -> Sequence[int]:
        """Return the lengths of whole documents, or of samples, that the context-parallel ranks
        share there.
        """

    @abstractmethod
    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum of their losses, float32: a ``parallel.data.LossSum``."""

    def validation_line(self, record: dict[str, Any]) -> str:
        """Describe a record's validation in one line."""
        return (
            f"validation loss at iteration {record['iteration']}: {record['validation_loss']:.4f}"
        )

    # The rest is for pipelines, and for runs without data.

    @abstractmethod
    def blank(self, micro_batch_size: int) -> Batch:
        """Return a micro-batch as the data's, of zeros; each sample is one document."""

    @abstractmethod
    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Return the name of the first stage's input in a part, and a tensor like it on the meta
        device.
        """

    @abstractmethod
    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Map parameters that several of the ``stages`` hold to those stages; ``part`` is any
        stage's.
        """
