"""Shard a model's weights, gradients and optimizer state over dp x cp (FSDP2)."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, *, bf16: bool) -> FSDPModule:
    """Apply FSDP2 to each layer and to the rest of the model, in place.

    Gradients are *summed* over the mesh, in float32, never averaged: the loss is already divided by the global number
    of valid tokens, and a mean of local means is wrong where ranks hold unequal numbers of them.

    Args:
        model: whole float32 weights, the same on every rank; they stay float32 as the optimizer's master weights.
        layers: the repeated blocks, gathered one at a time.
        mesh: one-dimensional, over all ranks that share the model.
        bf16: gather and compute in bfloat16.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
            module.set_gradient_divide_factor(1.0)
    return sharded
