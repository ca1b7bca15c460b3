"""The interface of an optimizer: its flags, parameter groups, state and requirements."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from train.checkpoint.api import Conversion
from train.config.flags import ConfigError

Group = dict[str, Any]
"""A parameter group of torch: ``params``, ``weight_decay``, and perhaps ``lr_factor``.

A step uses the schedule's learning rate times ``lr_factor``, by default 1. ``build`` also gets the
``names`` of the parameters, in the whole model, and the run's ``seed``.
"""


class Weight(NamedTuple):
    """A trained parameter, as optimizers choose its group."""

    name: str
    parameter: nn.Parameter
    is_hidden_matrix: bool = False
    """True for a layer's matrix that maps hidden states to hidden states, as the model states."""


class MatrixCost(NamedTuple):
    """Cost of a step for a weight that it takes whole."""

    shape: tuple[int, int]
    flops: float
    """FLOPs of the matmuls, of 2 for each multiplication with its addition."""
    dtype: torch.dtype
    """Dtype of the matmuls, and of what ranks send each other."""
    temporary_bytes: float
    """Bytes of temporary tensors at the peak, with the result but without the matrix itself."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix."""
        rows, columns = self.shape
        return rows * columns * self.dtype.itemsize


class StepPiece(NamedTuple):
    """Part of a rank's shard of a weight that a step updates at once."""

    elements: int
    """Maximum number of elements."""
    bytes: float
    """Bytes per element of temporary tensors and buffers on the device."""


NO_PIECE = StepPiece(0, 0.0)
"""A step that updates whole shards without temporary tensors."""


class OwnSettings:
    """Base of an optimizer's own settings, a frozen dataclass whose fields are flags."""

    def __post_init__(self) -> None:
        """Check the values. Raises UserError."""


class OptimizerSpec(ABC):
    """An optimizer, with its properties for training, checkpoints and the planner.

    ``config`` is always an OptimizerConfig, which also has the fields of all ``settings``.
    """

    settings: type[OwnSettings]
    """Dataclass of the optimizer's own settings; a command line has the flags of all optimizers."""
    free_settings: tuple[str, ...] = ()
    """Settings that a resumed run may change, such as the choice of a kernel."""
    states: tuple[str, ...]
    """Names, in torch and in checkpoints, of its state tensors of a parameter's shape."""
    matrix_states: tuple[str, ...] = ()
    """The same for weights that it takes whole (``takes_whole``)."""
    offloads: bool = False
    """True if it can step with its states in host memory (``optimizer_cpu_offload``)."""
    leaner_fields: tuple[str, ...] = ()
    """Settings that ``leaner_settings`` may change."""
    whole_matrices: bool = False
    """True if a step needs whole matrices instead of shards; ``build`` then gets ``ranks``."""

    def takes_whole(self, config: Any, weight: Weight) -> bool:
        """Return True if a step needs this weight's whole matrix."""
        return False

    def states_of(self, config: Any, weight: Weight) -> tuple[str, ...]:
        """Return the names of a weight's state tensors of its shape."""
        return self.matrix_states if self.takes_whole(config, weight) else self.states

    def state_bytes(self, config: Any, weight: Weight | None = None) -> float:
        """Return the bytes of state per element of a weight, on the device or in host memory.

        Without a weight, an upper bound for all weights. By default states are float32.
        """
        if weight is None:
            return 4.0 * max(len(self.states), len(self.matrix_states))
        return 4.0 * len(self.states_of(config, weight))

    def matrix_cost(self, config: Any, shape: tuple[int, int]) -> MatrixCost:
        """Return the cost of a step for a weight of this shape that it takes whole."""
        raise NotImplementedError(f"{type(self).__name__} takes whole matrices; add matrix_cost()")

    def step_piece(self, config: Any) -> StepPiece:
        """Return the part of a shard that is updated at once, by default without temporaries."""
        return NO_PIECE

    def leaner_settings(self, config: Any) -> Sequence[dict[str, Any]]:
        """Return settings that store states in fewer bits, and so change results, leanest last.

        The keys are ``leaner_fields``. The planner proposes the first that fit if memory is short.
        """
        return ()

    def states_title(self, config: Any) -> str:
        """Describe how states are stored in a few words; empty for the default."""
        return ""

    @property
    def setting_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.settings))  # type: ignore[arg-type]

    @property
    def compared_settings(self) -> tuple[str, ...]:
        """Names of the settings that a resumed run must share with its checkpoint."""
        fixed_settings = [name for name in self.setting_names if name not in self.free_settings]
        return ("optimizer", "weight_decay", *fixed_settings, "clip_grad")

    @abstractmethod
    def build(
        self,
        config: Any,
        groups: list[Group],
        *,
        portable: bool,
        ranks: dist.ProcessGroup | None = None,
    ) -> torch.optim.Optimizer:
        """Build the optimizer over ``groups``.

        Args:
            portable: use no kernel that may be missing; set in a rehearsal (a simulated run).
            ranks: if ``whole_matrices``, the ranks that hold the same part of the model, in
                slices or whole; None is this process alone.
        """

    def groups(self, config: Any, weights: Sequence[Weight]) -> list[Group]:
        """Return the groups of the trained parameters.

        By default only matrices decay, because shrinking a norm's weight or a bias regularises
        nothing.
        """
        parameters = [weight.parameter for weight in weights]
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        return [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    def check(self, config: Any, device_type: str) -> None:
        """Refuse settings that contradict each other or the run.

        Raises:
            ConfigError: names the settings and the fix.
        """
        if not config.optimizer_cpu_offload:
            return
        if not self.offloads:
            raise ConfigError(
                f"optimizer_cpu_offload is set, but optimizer {config.optimizer} cannot step with "
                "its state in host memory; leave out --optimizer-cpu-offload"
            )
        if device_type == "cpu":
            raise ConfigError(
                "optimizer_cpu_offload is set, but device is cpu, so the optimizer's state is in "
                "host memory anyway; leave out --optimizer-cpu-offload, or use --device cuda"
            )

    def conversion(self, config: Any) -> Conversion | None:
        """Return what converts a checkpoint's states to those of the run, if formats may differ."""
        return None

    def require_available(self, config: Any) -> None:  # noqa: B027
        """Raise UserError, with the reason and the fix, if the optimizer's kernel is missing."""
