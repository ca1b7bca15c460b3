"""Shard weights, gradients and optimizer state over dp x cp (FSDP2), and run micro-batches.

`Runner` is for a model without pipeline stages; parallel/pipeline/schedule.py has the runner for
stages.

FSDP and DTensor are imported inside functions: their import takes a second, and a command line that
is refused should not wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from runtime.errors import UserError, at_least
from runtime.tensors import Part

Strategy = Literal["ddp", "legacy_ddp", "zero1", "zero2", "zero3"]
WeightOf = Callable[[str, torch.Size, Part], Tensor]
"""Function that returns the initial values in a part of a parameter.

Its arguments are the parameter's name, its full shape, and the part's slice of each dimension. The
values do not depend on the rank or the mesh.
"""


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Sharding of weights, gradients and optimizer state over ranks with different tokens."""

    data_parallel_sharding_strategy: Literal[
        "ddp", "legacy_ddp", "zero1", "zero2", "zero3", "fsdp"
    ] = "zero3"
    """State to shard: none (ddp, or legacy_ddp, which sums all gradients at once after the last
    backward pass), the optimizer's state (zero1), the gradients too (zero2), or the weights as well
    (zero3, also called fsdp)."""
    num_distributed_optimizer_instances: int = 1
    """Number of copies of the state that zero1, zero2 or zero3 shards. Each copy is sharded over
    consecutive data- and context-parallel ranks, such as those of one node; gradients are summed
    over the copies."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_distributed_optimizer_instances")
        copies = self.num_distributed_optimizer_instances
        name = self.data_parallel_sharding_strategy
        if copies > 1 and name in ("ddp", "legacy_ddp"):
            raise UserError(
                f"num_distributed_optimizer_instances is {copies}, but "
                f"data_parallel_sharding_strategy {name} shards nothing; set "
                "num_distributed_optimizer_instances to 1, or the strategy to zero1"
            )

    @property
    def strategy(self) -> Strategy:
        """The strategy, with ``fsdp`` resolved to ``zero3``."""
        name = self.data_parallel_sharding_strategy
        return "zero3" if name == "fsdp" else name


def sharding_mesh(mesh: DeviceMesh, config: DataParallelConfig) -> DeviceMesh:
    """Return the mesh over which ``shard_model`` shards, given the mesh of dp x cp.

    Collective. With N > 1 copies of the state the result has the shape [N, ranks per copy]; for
    ``legacy_ddp`` it contains only this rank. With tensor parallelism, the one-dimensional ``mesh``
    must belong to a larger mesh that also has the dimension tp.
    """
    copies = config.num_distributed_optimizer_instances
    if config.strategy == "legacy_ddp":
        copies = mesh.size()
    if copies == 1:
        return mesh

    copies_mesh = mesh._unflatten(0, (copies, mesh.size() // copies), ("copies", "shards"))
    if dist.get_backend(mesh.get_group()) != dist.Backend.FAKE:
        # New groups do not inherit the timeout of the old group, so set it.
        backend = mesh.get_group()._get_backend(torch.device(mesh.device_type))
        for group in copies_mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(backend.options._timeout, group)
    return copies_mesh["shards"] if config.strategy == "legacy_ddp" else copies_mesh


def shard_model(
    model: nn.Module,
    layers: nn.ModuleList,
    mesh: DeviceMesh,
    *,
    bf16: bool,
    strategy: Strategy = "zero3",
    prefetch: bool = False,
) -> None:
    """Apply a sharding strategy to each layer and to the rest of the model, in place.

    ``ddp`` replicates the model and sums gradients during the backward pass (Li et al. 2020).
    ``legacy_ddp`` replicates it and keeps gradients local until ``finish_gradients`` (fairseq's
    LegacyDistributedDataParallel, with which LASP was measured). The others are ZeRO's stages
    (Rajbhandari et al. 2020, section 5); here they shard the float32 master weights in the same
    way as the optimizer's state.

    ``zero1`` and ``zero2`` gather the weights once per step and keep them until the step's last
    backward pass; ``zero3`` (FSDP) gathers each layer for its forward and again for its backward
    pass. ``zero1`` accumulates whole gradients and reduces them once per step; ``zero2`` and
    ``zero3`` reduce them after every micro-batch and keep shards. Call ``set_gradient_sync`` before
    each backward pass to mark the last one.

    On a two-dimensional mesh ZeRO shards along the last dimension and replicates along the first
    (hybrid sharding): weights are gathered within a copy, and the shards' gradients are summed over
    the copies once per step.

    Gradients are *summed* over the mesh in float32, never averaged: the loss is already divided by
    the global number of valid tokens, and a mean of local means is wrong if ranks hold unequal
    numbers of valid tokens.

    Args:
        model: float32, on any device or on the meta device; its weights stay float32 as the
            optimizer's masters.
        layers: the repeated blocks, gathered one at a time.
        mesh: from ``sharding_mesh``.
        bf16: gather and compute in bfloat16, except in modules of the layers that set
            ``full_precision``.
        prefetch: gather a layer's weights while the previous layer computes. On a CPU, which
            overlaps nothing, it only costs a layer's memory. Backward passes always prefetch.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    if strategy in ("ddp", "legacy_ddp"):
        # With legacy_ddp torch sees a mesh of a single rank, so it casts weights and accumulates
        # gradients, but sends nothing.
        if strategy == "legacy_ddp" and mesh.size() > 1:
            raise ValueError(
                f"strategy is legacy_ddp, but the mesh has {mesh.size()} ranks instead of 1; pass "
                "the mesh that sharding_mesh returns"
            )
        # Unlike DistributedDataParallel, this function, which is built on FSDP, supports DTensors,
        # and gradients in another dtype than the weights.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        apply: Callable[..., object] = partial(replicate, mesh=mesh, mp_policy=policy)
    else:
        # None reshards every module after its forward pass, except for the root, whose backward
        # pass comes next.
        reshard_after_forward = None if strategy == "zero3" else False
        apply = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )

    float32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in layers:
        for module in layer.modules():
            if bf16 and getattr(module, "full_precision", False):
                apply(module, mp_policy=float32_policy)
        apply(layer)
    # Only layers cast their inputs: bfloat16 cannot represent the times of a diffusion model.
    apply(model, mp_policy=replace(policy, cast_forward_inputs=False))

    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Otherwise FSDP would ask for a premultiplied sum, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if prefetch and strategy not in ("ddp", "legacy_ddp"):
        for module, next_layer in pairwise([model, *layers]):
            next_modules = [m for m in next_layer.modules() if isinstance(m, FSDPModule)]
            module.set_modules_to_forward_prefetch(next_modules)


@torch.no_grad()
def init_parameters(model: nn.Module, device: torch.device, weight_of: WeightOf | None) -> None:
    """Allocate and initialize the local shards of a model on the meta device.

    The values come from ``weight_of``, because torch's own initialization would draw the same
    numbers for every shard, and the weights would depend on the mesh. Without ``weight_of`` the
    memory stays uninitialized.
    """
    model.to_empty(device=device)
    if weight_of is None:
        return
    for name, parameter in model.named_parameters():
        local, slices = local_shard(parameter)
        local.copy_(weight_of(name, parameter.shape, slices))


@torch.no_grad()
def copy_whole(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's shard of a whole tensor (equal on every rank) into a parameter."""
    local, slices = local_shard(parameter)
    local.copy_(whole[slices])


def to_local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


def local_shard(parameter: Tensor) -> tuple[Tensor, Part]:
    """Return this rank's shard of a parameter, and the slices that it covers; no communication."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, length) for length in parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the parameter's mesh"
    return parameter.to_local(), shard_slices(parameter, coordinate)


def shard_slices(parameter: Any, coordinate: Sequence[int]) -> Part:
    """Return the slices of a DTensor that the rank with this coordinate in its mesh holds.

    If tensor parallelism and FSDP shard the same dimension, tensor parallelism sharded it first.
    So the dimensions of the mesh, of which tp is the last, are applied in reverse order.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = parameter.device_mesh
    slices = [slice(0, length) for length in parameter.shape]
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = parameter.placements[mesh_dim]
        if isinstance(placement, Shard | _StridedShard):
            start = slices[placement.dim].start
            stop = slices[placement.dim].stop
            chunk = -(-(stop - start) // mesh.size(mesh_dim))  # DTensor rounds shards' sizes up
            start = min(start + coordinate[mesh_dim] * chunk, stop)
            slices[placement.dim] = slice(start, min(start + chunk, stop))
    return tuple(slices)


def set_gradient_sync(model: nn.Module, last: bool, strategy: Strategy = "zero3") -> None:
    """Prepare the next backward pass; ``last`` is True for the step's last micro-batch.

    Call it before each backward pass. In the passes before the last one, only ``zero2`` and
    ``zero3`` reduce gradients (within a copy of the state), and every strategy except ``zero3``
    keeps gathered weights.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or strategy in ("zero2", "zero3"))
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or strategy == "zero3")


def finalize_by_hand(model: nn.Module) -> None:
    """Tell FSDP, before a forward pass, that gradients are reduced only at the step's end.

    torch 2.15 and newer require this.
    """
    from torch.distributed.fsdp import FSDPModule

    module: Any = model
    if isinstance(model, FSDPModule) and hasattr(model, "set_manual_backward_finalization"):
        module.set_manual_backward_finalization(True)


def widen_gradients(model: nn.Module) -> None:
    """Accumulate gradients in float32 after a backward pass in which FSDP's hooks did not run."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if not groups:  # torch before 2.13 stores one group per module, or None
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            for parameter in group.fsdp_params:
                # From torch 2.15 on autograd itself accumulates in float32.
                if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def reshard(model: nn.Module) -> None:
    """Free the gathered weights, so that the next forward gathers them from the shards again."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def finish_gradients(model: nn.Module, mesh: DeviceMesh, strategy: Strategy) -> None:
    """Reduce the gradients that a step's backward passes left unreduced; collective.

    ``legacy_ddp`` sums all gradients over the one-dimensional ``mesh`` in one all-reduce of a flat
    float32 buffer; every rank must have gradients for the same parameters. With the other
    strategies, the gradients were already reduced in the backward pass.
    """
    if strategy != "legacy_ddp":
        return
    gradients = [to_local(p.grad) for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=mesh.get_group())
    chunks = flat.split([gradient.numel() for gradient in gradients])
    sums = [chunk.view_as(x) for chunk, x in zip(chunks, gradients, strict=True)]
    torch._foreach_copy_(gradients, sums)


def untracked_replicas(mesh: DeviceMesh, strategy: Strategy) -> int:
    """Return how many ranks hold the same gradient without its DTensor recording it.

    The number is 1 if there are no such copies. ``gradient_norm`` needs it, because it would
    otherwise count every copy.
    """
    return mesh.size() if strategy == "legacy_ddp" else 1


MicroBatch = dict[str, Tensor]

LossSum = Callable[[nn.Module, MicroBatch], Tensor]
"""Function that maps a micro-batch to hidden states or, in the last stage, to the sum of its
losses.

In a later pipeline stage, the micro-batch has hidden states in place of the first stage's input.
"""


class Runner:
    """Runs a step's micro-batches through a model without pipeline stages."""

    def __init__(self, parts: Sequence[nn.Module], loss_sum: LossSum, strategy: Strategy) -> None:
        self.parts = parts
        self.loss_sum = loss_sum
        self.strategy = strategy

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank counts in norms and totals, keyed by name."""
        parameters: dict[str, nn.Parameter] = {}
        for part in self.parts:
            parameters.update(part.named_parameters())
        return parameters

    def forward_backward(self, batches: Sequence[MicroBatch], valid: int) -> Tensor:
        """Accumulate gradients of the loss sum / ``valid``; return this rank's share of the loss.

        The loss is float64, so that summing over micro-batches and ranks adds no rounding.
        """
        (model,) = self.parts
        losses = []
        for index, batch in enumerate(batches):
            set_gradient_sync(model, index == len(batches) - 1, self.strategy)
            loss = self.loss_sum(model, batch) / valid
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).double().sum()

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Return this rank's share of the sum of losses, in float64."""
        (model,) = self.parts
        return torch.stack([self.loss_sum(model, batch) for batch in batches]).double().sum()
