"""Shard a model's weights, gradients and optimizer state over the ranks of dp x cp (FSDP2), and run
micro-batches.

Here one rank holds the whole model; pipeline/schedule.py runs micro-batches through stages.

Functions import FSDP and DTensor, which takes a second: a refused command line does not wait for
it.
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
"""(parameter's name, whole shape, first and last + 1 of each dimension) -> that part, the same on
every rank.
"""


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Division of weights, gradients and optimizer state among ranks with different tokens."""

    data_parallel_sharding_strategy: Literal[
        "ddp", "legacy_ddp", "zero1", "zero2", "zero3", "fsdp"
    ] = "zero3"
    """State to divide: nothing (ddp; legacy_ddp, which sums all gradients at once after the last
    backward), the optimizer's state (zero1), also gradients (zero2), also weights (zero3, or by its
    other name fsdp)."""
    num_distributed_optimizer_instances: int = 1
    """Copies of what zero1, zero2 or zero3 divide: each is divided among consecutive data- and
    context-parallel ranks, such as those of one node, and gradients are summed over the copies."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_distributed_optimizer_instances")
        copies, name = (
            self.num_distributed_optimizer_instances,
            self.data_parallel_sharding_strategy,
        )
        if copies > 1 and name in ("ddp", "legacy_ddp"):
            raise UserError(
                f"num_distributed_optimizer_instances is {copies} with data_parallel_sharding_strategy {name}, which "
                "divides nothing and copies all; use 1, or strategy zero1"
            )

    @property
    def strategy(self) -> Strategy:
        """The strategy, with ``fsdp`` resolved to ``zero3``."""
        name = self.data_parallel_sharding_strategy
        return "zero3" if name == "fsdp" else name


def sharding_mesh(mesh: DeviceMesh, config: DataParallelConfig) -> DeviceMesh:
    """Return ``shard_model``'s mesh, made of the one-dimensional ``mesh`` over all ranks that share
    a model; collective.

    With N copies it is [N, ranks per copy]; for ``legacy_ddp``, this rank alone. With tensor
    parallelism ``mesh`` must belong to a larger mesh that also has the dimension tp.
    """
    copies = (
        mesh.size()
        if config.strategy == "legacy_ddp"
        else config.num_distributed_optimizer_instances
    )
    if copies == 1:
        return mesh
    arranged = mesh._unflatten(0, (copies, mesh.size() // copies), ("copies", "shards"))
    if dist.get_backend(mesh.get_group()) != dist.Backend.FAKE:
        device = torch.device(mesh.device_type)
        timeout = (
            mesh.get_group()._get_backend(device).options._timeout
        )  # new groups do not inherit it
        for group in arranged.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return arranged["shards"] if config.strategy == "legacy_ddp" else arranged


def shard_model(
    model: nn.Module,
    layers: nn.ModuleList,
    mesh: DeviceMesh,
    *,
    bf16: bool,
    strategy: Strategy = "zero3",
    prefetch: bool = False,
) -> None:
    """Apply a strategy to each layer and to the rest of the model, in place.

    ``ddp`` replicates the model and sums gradients during the backward (Li et al. 2020).
    ``legacy_ddp`` replicates it and keeps gradients local until ``finish_gradients`` (fairseq's
    LegacyDistributedDataParallel, with which LASP was measured). The others are ZeRO's stages
    (Rajbhandari et al. 2020, section 5), which shard the float32 master weights as they shard the
    optimizer's state.

    ``zero1`` and ``zero2`` gather the weights once per step and keep them until its last backward;
    ``zero3`` (FSDP) gathers each layer for its forward and again for its backward. ``zero1``
    accumulates whole gradients and reduces them once per step; ``zero2`` and ``zero3`` reduce them
    after every micro-batch and keep shards. Call ``set_gradient_sync`` before each backward to mark
    the last one.

    On a two-dimensional mesh ZeRO shards along the last dimension and replicates along the first
    (hybrid sharding): weights are gathered within a copy, and the shards' gradients are summed over
    the copies once per step.

    Gradients are *summed* over the mesh in float32, never averaged: the loss is already divided by
    the global number of valid tokens, and a mean of local means is wrong where ranks hold unequal
    numbers of them.

    Args:
        model: float32, on any device or on the meta device; its weights stay float32 as the
            optimizer's masters.
        layers: the repeated blocks, gathered one at a time.
        mesh: from ``sharding_mesh``.
        bf16: gather and compute in bfloat16, except in modules of the layers that set
            ``full_precision``.
        prefetch: post the gathering of a layer's weights before the layer before it is computed; on
            a CPU, which computes nothing meanwhile, it only costs a layer's memory. Backwards do so
            without being asked.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32
    )
    if strategy in ("ddp", "legacy_ddp"):
        # With legacy_ddp the library sees one rank: it casts, accumulates micro-batches, and sends
        # nothing.
        if strategy == "legacy_ddp" and mesh.size() > 1:
            raise ValueError(
                f"legacy_ddp is applied to one rank alone, not {mesh.size()}; take sharding_mesh's mesh"
            )
        # Unlike DistributedDataParallel, it takes DTensors, and gradients of another dtype than the
        # weights.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        apply: Callable[..., object] = partial(replicate, mesh=mesh, mp_policy=policy)
    else:
        reshard = (
            None if strategy == "zero3" else False
        )  # None: all but the root, whose backward is next
        apply = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    full = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in layers:
        for module in layer.modules():
            if bf16 and getattr(module, "full_precision", False):
                apply(module, mp_policy=full)
        apply(layer)
    # Only layers cast their inputs: bfloat16 cannot represent a diffusion model's times.
    apply(model, mp_policy=replace(policy, cast_forward_inputs=False))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
            module.set_gradient_divide_factor(1.0)
    if prefetch and strategy not in ("ddp", "legacy_ddp"):
        for module, following in pairwise([model, *layers]):
            module.set_modules_to_forward_prefetch(
                [m for m in following.modules() if isinstance(m, FSDPModule)]
            )


@torch.no_grad()
def init_parameters(model: nn.Module, device: torch.device, weight_of: WeightOf | None) -> None:
    """Materialize and initialize a sharded model on the meta device, each parameter by its part on
    this rank.

    Drawn by torch's own way, all shards would hold the same numbers, and the weights would depend
    on the mesh. Without ``weight_of`` they are what the memory holds.
    """
    model.to_empty(device=device)
    if weight_of is None:
        return
    for name, parameter in model.named_parameters():
        own, part = own_part(parameter)
        own.copy_(weight_of(name, parameter.shape, part))


@torch.no_grad()
def copy_whole(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy a whole tensor, the same on every rank, into what this rank holds of a parameter."""
    own, part = own_part(parameter)
    own.copy_(whole[part])


def to_local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


def own_part(parameter: Tensor) -> tuple[Tensor, Part]:
    """Return what this rank holds of a parameter, and which part of the whole that is; no
    communication.

    Where tensor parallelism and FSDP split the same dimension, tensor parallelism (the last of the
    mesh) split first.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    part = [slice(0, length) for length in parameter.shape]
    if not isinstance(parameter, DTensor):
        return parameter, tuple(part)
    for mesh_dim in reversed(range(parameter.device_mesh.ndim)):
        placement = parameter.placements[mesh_dim]
        if isinstance(placement, Shard | _StridedShard):
            size, rank = (
                parameter.device_mesh.size(mesh_dim),
                parameter.device_mesh.get_local_rank(mesh_dim),
            )
            start, stop = part[placement.dim].start, part[placement.dim].stop
            chunk = -(-(stop - start) // size)
            start = min(start + rank * chunk, stop)
            part[placement.dim] = slice(start, min(start + chunk, stop))
    return parameter.to_local(), tuple(part)


def set_gradient_sync(model: nn.Module, last: bool, strategy: Strategy = "zero3") -> None:
    """Say whether the next backward is that of the step's ``last`` micro-batch; call before each
    one.

    Before the last one, only ``zero2`` and ``zero3`` reduce gradients, within a copy, and all but
    ``zero3`` keep whole weights.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or strategy in ("zero2", "zero3"))
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or strategy == "zero3")


def finalize_by_hand(model: nn.Module) -> None:
    """Announce, before a forward, that the step's gradients are reduced at its end and not by its
    last backward.

    torch asks for it from 2.15 on.
    """
    from torch.distributed.fsdp import FSDPModule

    module: Any = model
    if isinstance(model, FSDPModule) and hasattr(model, "set_manual_backward_finalization"):
        module.set_manual_backward_finalization(True)


def widen_gradients(model: nn.Module) -> None:
    """Add the gradients of a backward without FSDP's hooks to the sums in float32, as these hooks
    do.
    """
    from torch.distributed.fsdp import FSDPModule

    for state in (
        module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
    ):
        # torch before 2.13 has one group of parameters a module, or none
        for group in getattr(state, "_fsdp_param_groups", None) or filter(
            None, [state._fsdp_param_group]
        ):
            for parameter in group.fsdp_params:
                if hasattr(
                    parameter, "accumulate_unsharded_grad_if_needed"
                ):  # autograd itself sums so from 2.15 on
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def reshard(model: nn.Module) -> None:
    """Free the whole weights that forwards left, so that the next forward gathers them from the
    shards.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def finish_gradients(model: nn.Module, mesh: DeviceMesh, strategy: Strategy) -> None:
    """Reduce the gradients that a step's backwards left unreduced; collective over the
    one-dimensional ``mesh``.

    ``legacy_ddp`` sums all gradients in one all-reduce of a flat float32 buffer; every rank must
    have the same ones. The other strategies summed theirs in the backward.
    """
    if strategy != "legacy_ddp":
        return
    locals_ = [to_local(p.grad) for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in locals_])
    dist.all_reduce(flat, group=mesh.get_group())
    parts = flat.split([g.numel() for g in locals_])
    torch._foreach_copy_(locals_, [part.view_as(g) for part, g in zip(parts, locals_, strict=True)])


def untracked_replicas(mesh: DeviceMesh, strategy: Strategy) -> int:
    """Return how many ranks hold a copy of each gradient without its DTensor knowing, for
    ``gradient_norm``.
    """
    return mesh.size() if strategy == "legacy_ddp" else 1


MicroBatch = dict[str, Tensor]

LossSum = Callable[[nn.Module, MicroBatch], Tensor]
"""Map a micro-batch to hidden states or, in the last stage, to the sum of its losses.

After the first stage, the batch holds hidden states in place of that stage's input.
"""


class Runner:
    """Run a step's micro-batches through a model that one rank holds whole."""

    def __init__(self, parts: Sequence[nn.Module], loss_sum: LossSum, strategy: Strategy) -> None:
        self.parts, self.loss_sum, self.strategy = parts, loss_sum, strategy

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by name, without tied copies that another rank of pp
        counts.
        """
        return {
            name: parameter for part in self.parts for name, parameter in part.named_parameters()
        }

    def forward_backward(self, batches: Sequence[MicroBatch], valid: int) -> Tensor:
        """Accumulate the gradients of the summed losses divided by ``valid``; return this rank's
        share of that loss.

        The share is float64: summing micro-batches and ranks adds no rounding to that of each loss.
        """
        (model,), losses = self.parts, []
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
