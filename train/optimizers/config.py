"""The section [optimizer] of a configuration, and the optimizer that it builds."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from model.parts.weights import is_hidden_matrix
from parallel.mesh import Mesh
from runtime.errors import UserError, at_least
from train.optimizers import OPTIMIZERS
from train.optimizers.base import OptimizerSpec, Weight
from train.schedule import ScheduleConfig

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]

# Later optimizers come first: their settings may inherit from those of an earlier one.
OWN_SETTINGS = tuple(spec.settings for spec in reversed(OPTIMIZERS.values()))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(*OWN_SETTINGS, ScheduleConfig):  # type: ignore[misc]
    """The optimizer, its settings and its learning rate."""

    optimizer: OptimizerName = "adam"
    """Update rule. The default is AdamW, Adam with decoupled weight decay (Loshchilov and Hutter
    2019); muon is Muon for the matrices of the layers, and AdamW for all other weights
    (docs/tasks/optimizers.md)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip_grad: float = 1.0
    """Maximum global norm of the gradients; larger ones are scaled down. 0 disables clipping."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state, 8 bytes per parameter for Adam with fp32 moments, in host memory.
    A step copies it to the device and back in pieces, which takes time but does not change the
    result (docs/concepts/memory.md)."""

    def __post_init__(self) -> None:
        ScheduleConfig.__post_init__(self)
        at_least(self, 0, "weight_decay", "clip_grad")
        if self.optimizer not in OPTIMIZERS:
            names = ", ".join(OPTIMIZERS)
            raise UserError(f"optimizer is {self.optimizer}; it must be one of {names}")
        self.spec.settings.__post_init__(self)
        self._refuse_others_settings()

    @property
    def spec(self) -> OptimizerSpec:
        """The chosen optimizer."""
        return OPTIMIZERS[self.optimizer]

    @property
    def lines(self) -> list[str]:
        """The line that names the optimizer; none for AdamW with moments in float32."""
        states = self.spec.states_title(self)
        if self.optimizer == OptimizerConfig.optimizer and not states:
            return []
        title = f"optimizer: {self.optimizer}"
        return [f"{title}, {states}" if states else title]

    def _refuse_others_settings(self) -> None:
        """Raise UserError for a setting that belongs to another optimizer than the chosen one."""
        for name, spec in OPTIMIZERS.items():
            for field in fields(spec.settings):  # type: ignore[arg-type]
                value = getattr(self, field.name)
                if field.name not in self.spec.setting_names and value != field.default:
                    raise UserError(
                        f"{field.name} is {value}, but it is a setting of optimizer {name}, and "
                        f"optimizer is {self.optimizer}; leave out the setting, or give "
                        f"--optimizer {name}"
                    )


def build_optimizer(
    config: OptimizerConfig,
    *parts: nn.Module,
    seed: int = 0,
    portable: bool = False,
    mesh: Mesh | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of the trained parameters in ``parts``, this rank's parts of the model.

    Collective if the optimizer needs whole matrices.

    Args:
        seed: the run's, for random rounding.
        portable: avoid kernels that may be missing on the machine of a rehearsal (a simulated run).
        mesh: the run's mesh; None if this process holds all parameters whole.
    """
    spec = config.spec
    ranks = mesh.stage_group if mesh is not None and spec.whole_matrices else None
    weights = trained_weights(*parts)
    name_of = {weight.parameter: weight.name for weight in weights}
    groups: list[dict[str, Any]] = spec.groups(config, weights)
    for group in groups:
        group["names"] = [name_of[parameter] for parameter in group["params"]]
        group["seed"] = seed
    return spec.build(config, groups, portable=portable, ranks=ranks)


def trained_weights(*parts: nn.Module) -> list[Weight]:
    """Return the trained parameters of a model's parts."""
    weights = []
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                weights.append(Weight(name, parameter, is_hidden_matrix(part, name)))
    return weights
