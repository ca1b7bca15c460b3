"""Collectives through which gradients flow."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SumOverRanks(torch.autograd.Function):
    """An all-reduce whose backward pass also sums, because each rank uses the total differently."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum."""
        ctx.group = group
        return _sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients."""
        return _sum_over_ranks(gradients[0], ctx.group), None


def _sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
