"""What is trained, as the loop, the runners and the lines on the screen need it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from data.loader import Batch


class Objective(ABC):
    """How a batch is shared out over the ranks, what its loss is, and how records and lines name that."""

    loss_name: ClassVar[str]
    """The field of a record with the training loss, one of ``train.metrics.LOSSES``."""
    unit: ClassVar[str]
    """What the rate on the screen counts; a record has it as ``UNIT_per_second``."""

    @property
    @abstractmethod
    def local_length(self) -> int:
        """Tokens of a sample that this rank takes, padding included."""

    @abstractmethod
    def local(self, batch: Batch) -> Batch:
        """This rank's part of a batch, on its device."""

    @abstractmethod
    def count(self, local: Batch) -> int:
        """Tokens of that part that carry loss."""

    @abstractmethod
    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """The sum of their losses, float32: a ``parallel.pipeline.runner.LossSum``."""

    @abstractmethod
    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """What the first stage takes of a part: its name there, and one like it on the meta device."""

    @abstractmethod
    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Parameters of which several of the ``stages`` hold a copy each, and these stages; ``part`` is any stage's."""

    def validation_line(self, record: dict[str, Any]) -> str:
        """One line on the validation of a record."""
        return f"validation loss at iteration {record['iteration']}: {record['validation_loss']:.4f}"
