"""A sum over ranks through which gradients flow, and a comparison of tensors between ranks."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes for reading the bits of other dtypes of the same size; keyed by size in bytes."""


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


class Difference(NamedTuple):
    """Tensors that are not the same on all ranks of a group."""

    names: list[str]
    ranks: list[int]
    """Ranks of the group whose tensors differ from those of the group's rank 0."""


def find_difference(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> Difference | None:
    """Compare tensors between the ranks of a group; None if they are the same. Collective.

    Shapes, dtypes and bits are compared by checksums. Each rank sends one number for all tensors,
    and only if these numbers differ, one per tensor.
    """
    if group is None:
        return None
    device = device_of(group)
    checksums = {name: checksum(tensors[name]).to(device) for name in sorted(tensors)}
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number in checksums.values():
        total = 31 * total + number
    totals = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
    dist.all_gather(totals, total, group=group)
    if all(bool(other == totals[0]) for other in totals):
        return None

    described = {name: int(number) for name, number in checksums.items()}
    gathered: list[Any] = [None] * len(totals)
    dist.all_gather_object(gathered, described, group=group)
    names: set[str] = set()
    ranks: list[int] = []
    for rank, other in enumerate(gathered):
        if other != gathered[0]:
            ranks.append(rank)
            names.update(name for name, _ in other.items() ^ gathered[0].items())
    return Difference(sorted(names), ranks)


def checksum(x: Tensor) -> Tensor:
    """Return a checksum of a tensor's shape, dtype and bits: an int64 scalar on its device.

    Each element is weighted by its index, so the same elements in another order differ. The sum
    is modulo 2^64: it is exact, so the order in which a device adds does not matter.
    """
    values = torch.view_as_real(x) if x.is_complex() else x
    bits = values.detach().contiguous().view(INTEGERS[values.element_size()]).flatten().long()
    weights = torch.arange(1, len(bits) + 1, device=x.device)
    header = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
    return (bits * weights).sum() + header


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device from which a group's backend sends."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
