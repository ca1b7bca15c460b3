"""Gradients of a step: summed over the ranks, measured, and clipped."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.data import Runner, finish_gradients, to_local, untracked_replicas

NORM_CHUNK = 1 << 18
"""Elements of a gradient that its norm copies to float64 at once on a CPU: 2 MB, as its cache."""


def gradient_norm(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None, *, copies: int = 1
) -> Tensor:
    """Return the 2-norm of the whole gradient, float64 []; collective.

    A shard that several ranks hold, because a DTensor is replicated over a mesh dimension, counts
    once. Summed in float64: in float32 a large tensor is off by 1e-5, by an amount that depends on
    the shards' sizes.

    Args:
        group: the ranks that share the gradient; by default all.
        copies: ranks that hold each shard, besides those its mesh shows
            (``parallel.data.untracked_replicas``).
    """
    from torch.distributed.tensor import DTensor

    alike: dict[Any, list[Tensor]] = defaultdict(list)  # one launch for all of them
    for gradient in (p.grad for p in parameters if p.grad is not None):
        shard, replicas = to_local(gradient), 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            replicas = math.prod(size for size, placement in sizes if placement.is_replicate())
        alike[shard.device, shard.dtype, replicas].append(shard)
    sums = [_square(shards) / replicas for (*_, replicas), shards in alike.items()]
    squares = torch.stack(sums).sum() / copies
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm, float64 [], of tensors of one device and dtype.

    Never copies a whole tensor. CUDA's ``_foreach_norm`` adds up squares in the dtype asked for
    while it reads (aten's ForeachReduceOp.cu), in one launch. The CPU's is ``vector_norm`` of each
    tensor: it copies to float64 first, hence the small parts, and its sums in float32 are no way
    out: one running sum in each lane of a vector, off by 1 % at 1e8 elements.
    """
    if tensors[0].device.type == "cpu":
        tensors = [part for x in tensors for part in x.flatten().split(NORM_CHUNK)]
    nonempty = [x for x in tensors if x.numel()]
    if not nonempty:  # this rank's parts of small parameters
        return tensors[0].new_zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(nonempty, 2, torch.float64)).square().sum()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scale gradients of 2-norm ``norm`` to a norm of at most ``largest``; 0 does not clip."""
    if 0 < largest < norm < math.inf:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], largest / norm)


def reduce_and_clip(
    runner: Runner, replicas: DeviceMesh, largest: float, loss: Tensor
) -> tuple[float, float]:
    """Reduce and clip a step's gradients; return the loss, and their norm before clipping.

    Collective. Both numbers come in one read, the step's only wait for the device.

    Raises:
        RuntimeError: part of the model has no gradient.
    """
    parameters, strategy = runner.parameters(), runner.strategy
    missing = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
    if missing:
        names = ", ".join(missing)
        raise RuntimeError(f"no gradient reached {names}: part of the model is not trained")
    for part in runner.parts:
        finish_gradients(part, replicas, strategy)
    size = gradient_norm(parameters.values(), copies=untracked_replicas(replicas, strategy))
    mean_loss, norm = torch.stack((loss.double(), size)).tolist()
    clip_gradients([p for part in runner.parts for p in part.parameters()], norm, largest)
    return mean_loss, norm
