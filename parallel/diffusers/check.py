"""Compare a sharded diffusion transformer with one process: loss and every gradient."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parallel.comparison import Report, compare_losses

Objective = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""Function (model, inputs) -> loss."""


def compare(
    model: nn.Module,
    inputs: Mapping[str, Any],
    objective: Objective,
    group: dist.ProcessGroup | None,
    paused: Callable[[], AbstractContextManager[None]],
) -> Report:
    """Compute the report of ``Sharded.check``; ``paused`` is as for ``compare_losses``."""
    size = 1 if group is None else dist.get_world_size(group)

    def share(model: nn.Module) -> Tensor:
        return objective(model, inputs) / size  # every rank computes the whole loss

    def alone(model: nn.Module) -> Tensor:
        return objective(model, inputs)

    def exact(model: nn.Module) -> Tensor:
        return objective(model, tree_map_only(Tensor, _in_float64, dict(inputs)))

    return compare_losses(model, group, paused, sharded=[share], one_process=[alone], exact=[exact])


def _in_float64(x: Tensor) -> Tensor:
    return x.to(torch.float64) if x.is_floating_point() else x
