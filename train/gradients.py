"""Sum a step's gradients over the ranks, measure their norm, and clip them."""

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
"""Number of elements copied to float64 at once for a norm on a CPU: 2 MB, which fit in its cache.
"""


def gradient_norm(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None, *, copies: int = 1
) -> Tensor:
    """Return the 2-norm of the whole gradient, float64 []; collective.

    A shard that several ranks hold, because a DTensor is replicated over a mesh dimension, counts
    once. Sums are in float64, because in float32 the norm of a large tensor has an error of 1e-5
    that depends on the shards' sizes, so different meshes would clip differently.

    Args:
        group: the ranks that share the gradient; by default all.
        copies: number of ranks with a copy of each gradient that its DTensor does not show
            (``parallel.data.untracked_replicas``).
    """
    from torch.distributed.tensor import DTensor

    # Shards that can share one kernel launch, with the number of ranks that hold each.
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        shard = to_local(gradient)
        replicas = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            replicas = math.prod(size for size, placement in sizes if placement.is_replicate())
        groups[shard.device, shard.dtype, replicas].append(shard)

    squared_norms = [_squared_norm(shards) / replicas for (*_, replicas), shards in groups.items()]
    squares = torch.stack(squared_norms).sum() / copies
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm, float64 [], of tensors of one device and dtype.

    Never copies a whole tensor. CUDA's ``_foreach_norm`` sums squares in the requested dtype while
    it reads (aten's ForeachReduceOp.cu), in one launch. On a CPU it calls ``vector_norm`` for
    each tensor, which copies the tensor to float64 first, so large tensors are split into chunks.
    Sums in float32 are no alternative there: each vector lane has one running sum, and the result
    is off by 1 % at 1e8 elements.
    """
    if tensors[0].device.type == "cpu":
        chunks: list[Tensor] = []
        for tensor in tensors:
            chunks += tensor.flatten().split(NORM_CHUNK)
        tensors = chunks
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty:  # small parameters may have no elements on this rank
        return tensors[0].new_zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(nonempty, 2, torch.float64)).square().sum()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients of 2-norm ``norm`` to a norm of at most ``max_norm``; 0 disables clipping."""
    if 0 < max_norm < norm < math.inf:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, max_norm / norm)


def reduce_and_clip(
    runner: Runner, replicas: DeviceMesh, max_norm: float, loss: Tensor
) -> tuple[float, float]:
    """Reduce and clip a step's gradients; return the loss, and their norm before clipping.

    Collective. Both numbers are read in one copy; only there does a step wait for the device.

    Raises:
        RuntimeError: part of the model has no gradient.
    """
    parameters = runner.parameters()
    strategy = runner.strategy
    missing = []
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.grad is None:
            missing.append(name)
    if missing:
        raise RuntimeError(
            f"no gradient reached {', '.join(missing)}: part of the model is not trained"
        )

    for part in runner.parts:
        finish_gradients(part, replicas, strategy)
    norm_on_device = gradient_norm(
        parameters.values(), copies=untracked_replicas(replicas, strategy)
    )
    mean_loss, norm = torch.stack((loss.double(), norm_on_device)).tolist()

    all_parameters: list[nn.Parameter] = []
    for part in runner.parts:
        all_parameters += part.parameters()
    clip_gradients(all_parameters, norm, max_norm)
    return mean_loss, norm
