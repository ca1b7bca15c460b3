"""The interface of an optimizer: its flags, parameter groups and state, and where it can step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from train.config.flags import ConfigError

Group = dict[str, Any]
"""A parameter group of torch: ``params``, ``weight_decay``, and perhaps ``lr_factor``.

A step takes the schedule's learning rate times ``lr_factor``, by default 1.
"""


class OwnSettings:
    """Base of an optimizer's own settings, a frozen dataclass whose fields are flags."""

    def __post_init__(self) -> None:
        """Check the values. Raises UserError."""


class OptimizerSpec(ABC):
    """An optimizer, with all that training, checkpoints and the planner must know of it.

    ``config`` is an OptimizerConfig everywhere; it has the fields of ``settings`` besides its own.
    """

    settings: type[OwnSettings]
    """Its own settings, which begin with its name: the settings of all optimizers are flags."""
    free_settings: tuple[str, ...] = ()
    """Settings that change no number, so that a resumed run may have them otherwise."""
    states: tuple[str, ...]
    """Names of its float32 tensors of a parameter's shape, as torch and checkpoints have them."""
    offloads: bool = False
    """True if it can step with these in host memory (``optimizer_cpu_offload``)."""
    whole_matrices: bool = False
    """True if a step needs whole matrices, which ranks that share the weights do not have."""

    @property
    def state_bytes(self) -> int:
        """Bytes of state for a trained parameter, on the device or, offloaded, in host memory."""
        return 4 * len(self.states)

    @property
    def setting_names(self) -> tuple[str, ...]:
        """Names of the optimizer's own settings."""
        return tuple(field.name for field in fields(self.settings))  # type: ignore[arg-type]

    @property
    def compared_settings(self) -> tuple[str, ...]:
        """Names of the settings that a resumed run must share with its checkpoint."""
        own_settings = (name for name in self.setting_names if name not in self.free_settings)
        return ("optimizer", "weight_decay", *own_settings, "clip_grad")

    @abstractmethod
    def build(self, config: Any, groups: list[Group], *, portable: bool) -> torch.optim.Optimizer:
        """Build the optimizer over ``groups``.

        Args:
            portable: use no kernel that may be missing here; set in a rehearsal without a device.
        """

    def groups(self, config: Any, parameters: Sequence[tuple[str, nn.Parameter]]) -> list[Group]:
        """Return the groups of the trained parameters.

        By default only matrices decay: shrinking a norm's weight or a bias regularises nothing.
        """
        matrices = [parameter for _, parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for _, parameter in parameters if parameter.ndim < 2]
        return [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    def check(self, config: Any, device_type: str, *, sharded: bool) -> None:
        """Refuse settings that contradict each other or the run.

        Args:
            sharded: ranks share the weights, or their updates.

        Raises:
            ConfigError: names the settings and the fix.
        """
        if self.whole_matrices and sharded:
            raise ConfigError(
                f"optimizer is {config.optimizer}, whose step needs whole matrices, and ranks "
                "share them; give --data-parallel-sharding-strategy ddp without tensor parallelism"
            )
        if not config.optimizer_cpu_offload:
            return
        if not self.offloads:
            raise ConfigError(
                f"optimizer_cpu_offload is set and optimizer is {config.optimizer}, which has no "
                "step on state in host memory; leave it out"
            )
        if device_type == "cpu":
            raise ConfigError(
                "optimizer_cpu_offload is set and device is cpu, where the optimizer's state lies "
                "in host memory already; leave it out, or use --device cuda"
            )

    def require_available(self, config: Any) -> None:  # noqa: B027
        """Raise UserError, with the reason and the fix, if the step's kernel is not here."""
