"""Share a model's weights, gradients and optimizer state among the ranks of dp x cp (FSDP2)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """What the ranks that hold different tokens divide among them."""

    data_parallel_sharding_strategy: Strategy = "zero3"
    """What is divided: nothing (ddp), the optimizer's state (zero1), also gradients (zero2), also weights (zero3)."""


def shard_model(
    model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, *, bf16: bool, strategy: Strategy = "zero3"
) -> None:
    """Apply a strategy to each layer and to the rest of the model, in place.

    ``ddp`` replicates, and sums gradients while the backward goes on (Li et al. 2020). The others are ZeRO's stages
    (Rajbhandari et al. 2020, section 5); with them float32 master weights lie in shards, as the optimizer's state does.
    ``zero1`` and ``zero2`` gather the weights once per step and keep them until its last backward; ``zero3`` (FSDP)
    gathers each layer for its forward and again for its backward. ``zero1`` adds up the micro-batches' gradients whole
    and sums them over the ranks once; ``zero2`` and ``zero3`` do so after every micro-batch and keep shards. Which
    micro-batch is the last one, ``reduce_gradients`` is told.

    Gradients are *summed* over the mesh, in float32, never averaged: the loss is already divided by the global number
    of valid tokens, and a mean of local means is wrong where ranks hold unequal numbers of them.

    Args:
        model: float32, on any device or on the meta device; its weights stay float32 as the optimizer's masters.
        layers: the repeated blocks, gathered one at a time.
        mesh: one-dimensional, over all ranks that share the model.
        bf16: gather and compute in bfloat16.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    if strategy == "ddp":
        # Unlike DistributedDataParallel it takes DTensors, and gradients in another dtype than the weights'.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        apply: Callable[[nn.Module], object] = partial(replicate, mesh=mesh, mp_policy=policy)
    else:
        reshard = None if strategy == "zero3" else False  # None: but for the outermost module, whose backward is next
        apply = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for layer in layers:
        apply(layer)
    apply(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
            module.set_gradient_divide_factor(1.0)


@torch.no_grad()
def fill(model: nn.Module, device: torch.device, weight_of: Callable[[str, torch.Size], Tensor]) -> None:
    """Give a sharded model on the meta device its weights, one whole tensor at a time.

    Each rank draws the *whole* parameter and keeps its shard: drawn shard by shard, every shard would hold the same
    numbers, and the weights would depend on the mesh.

    Args:
        weight_of: (parameter's name, whole shape) -> whole tensor, the same on every rank.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        whole = weight_of(name, parameter.shape).to(device)
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(own_shard(whole, parameter))
        else:
            parameter.copy_(whole)


def own_shard(whole: Tensor, like: DTensor) -> Tensor:
    """The part of a whole tensor that this rank holds of ``like``; nothing is sent.

    Where tensor parallelism and FSDP split one dimension, the former, which is the mesh's last dimension, did so first.
    """
    for mesh_dim in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[mesh_dim]
        if isinstance(placement, Shard | _StridedShard):
            size, rank = like.device_mesh.size(mesh_dim), like.device_mesh.get_local_rank(mesh_dim)
            length = whole.shape[placement.dim]
            chunk = -(-length // size)
            start = min(rank * chunk, length)
            whole = whole.narrow(placement.dim, start, min(chunk, length - start))
    return whole


def reduce_gradients(model: nn.Module, last: bool, strategy: Strategy = "zero3") -> None:
    """Say before each backward whether it is of the ``last`` micro-batch of its step.

    Before the last one ``ddp`` and ``zero1`` only accumulate on each rank, and all but ``zero3`` keep whole weights.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or strategy in ("zero2", "zero3"))
        model.set_reshard_after_backward(last or strategy == "zero3")
