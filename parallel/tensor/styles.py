"""Parallel styles, each splitting one module over the tensor-parallel ranks.

parallel/tensor/split.py takes them by the words of the parts.

Shapes as in that file.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from kernels.operators import linear
from runtime.tensors import accum_dtype


def of_tokens(x: Tensor, mesh: DeviceMesh) -> Any:
    """Wrap this rank's hidden states in a DTensor sharded over tokens; return token ids unchanged."""
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False) if x.is_floating_point() else x


def scattered(part: Tensor, mesh: DeviceMesh) -> DTensor:
    """Reduce-scatter ``part`` [..., T, C] over T."""
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(
        placements=[Shard(part.ndim - 2)]
    )


def shard_parameters(module: nn.Module, mesh: DeviceMesh, dim: int = 0) -> None:
    """Shard the parameters of a module itself, in place: matrices along ``dim``, vectors by
    entries.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        split = distribute_tensor(parameter, mesh, [Shard(dim if parameter.ndim > 1 else 0)])
        module.register_parameter(name, nn.Parameter(split))


class AllTokens(ParallelStyle):
    """A module that takes all tokens and returns partial sums [B, T, C]; outside, both are sharded
    over T.

    All matrices of the module share one all-gather of its input, whose gradient is partial on each
    rank too. With ``plain``, input and output are plain tensors of this rank's tokens.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any) -> Any:
            x: Any = of_tokens(inputs[0], device_mesh) if self.plain else inputs[0]
            return x.redistribute(placements=[Replicate()]).to_local(
                grad_placements=[Partial()]
            ), *inputs[1:]

        def scatter(module: nn.Module, inputs: Any, part: Tensor) -> Tensor:
            x = scattered(part, device_mesh)
            return x.to_local() if self.plain else x

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


class Matrix(ParallelStyle):
    """A linear layer split by output channels (dim 0 of its weight) or by input channels (dim 1).

    Split by input channels, it returns partial sums, to which each rank adds its shard of the bias.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            weight: Any = module.weight
            bias: Any = module.bias
            if bias is not None:
                bias = bias.to_local() if self.dim == 0 else own_entries(bias)
            return linear(x, weight.to_local(), bias)

        shard_parameters(module, device_mesh, self.dim)
        module.forward = forward
        return module


def own_entries(x: DTensor) -> Tensor:
    """Return this rank's entries of a sharded vector, with zeros in place of the others."""
    first, local = first_entry(x), x.to_local()
    return F.pad(local, (first, len(x) - first - len(local)))


class Whole(ParallelStyle):
    """A replicated linear layer, embedding or RMS norm, applied to this rank's own input; its
    gradients are partial.

    With ``rows``, those of its weight and bias alone are used: a key or value projection of fewer
    heads than ranks, whose gradient is 0 on each rank except for its head, and summed over the
    ranks that share that head.
    """

    def __init__(self, rows: slice = slice(None)) -> None:
        super().__init__()
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            whole: Any = dict(module.named_parameters(recurse=False))
            own = {
                name: p.to_local(grad_placements=[Partial()])[self.rows]
                for name, p in whole.items()
            }
            if type(module) is nn.RMSNorm:
                return F.rms_norm(x, list(module.normalized_shape), own["weight"], module.eps)
            if isinstance(module, nn.Embedding):
                return F.embedding(x, **own)
            found: Tensor = linear(x, **own) if isinstance(module, nn.Linear) else plain(x, **own)
            return found

        plain: Any = module.forward  # of the model's own norms, which take a weight
        distribute_module(module, device_mesh)
        module.forward = forward
        return module


class PerHead(ParallelStyle):
    """Attributes of a module that are of heads, by their names; the module keeps those of this
    rank's heads.

    Parameters are vectors, which are sharded; the module's forward takes this rank's entries by
    their names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        part: Any = module
        size, rank = device_mesh.size(), device_mesh.get_local_rank()
        parameters: list[str] = []
        for name in self.names:
            value = getattr(part, name)
            if isinstance(value, nn.Parameter):
                split = distribute_tensor(value, device_mesh, [Shard(0)])
                part.register_parameter(name, nn.Parameter(split))
                parameters.append(name)
            elif isinstance(value, int):
                setattr(part, name, value // size)
            elif value is not None:
                heads = len(value) // size
                setattr(part, name, value[rank * heads : (rank + 1) * heads])
        if parameters:
            plain = part.forward
            # Read at every call: FSDP replaces the parameters.
            part.forward = lambda *inputs: plain(
                *inputs, **{name: getattr(part, name).to_local() for name in parameters}
            )
        return module


class JointNorm(ParallelStyle):
    """An RMS norm over the channels of all heads; each rank has [..., C / size] of them, or [..., H
    / size, D].

    Ranks sum their squares and, in the backward, the gradients of these. In float32 at least,
    rounded once.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            wide = x.to(accum_dtype(x.dtype))
            wide = wide if wide.shape[-1] * size == channels else wide.flatten(-2)
            squares = _Sum.apply(wide.square().sum(-1, keepdim=True), device_mesh.get_group())
            found = wide * torch.rsqrt(squares / channels + eps)
            weight: Any = module.weight
            found = found if weight is None else found * weight.to_local().to(wide.dtype)
            return found.to(x.dtype).view_as(x)

        eps: Any = module.eps
        normalized: Any = module.normalized_shape
        (channels,), size = normalized, device_mesh.size()
        shard_parameters(module, device_mesh)
        module.forward = forward
        return module


class _Sum(torch.autograd.Function):
    """An all-reduce that also sums gradients in the backward, since each rank uses the sum
    differently.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class OwnTokens(ParallelStyle):
    """A parameter-free function of positions, [..., T] -> [..., T, C], computed for this rank's
    tokens only.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own(module: nn.Module, inputs: Any) -> Any:
            return inputs[0].chunk(device_mesh.size(), -1)[device_mesh.get_local_rank()], *inputs[
                1:
            ]

        def sharded(module: nn.Module, inputs: Any, x: Tensor) -> DTensor:
            return DTensor.from_local(x, device_mesh, [Shard(x.ndim - 2)], run_check=False)

        module.register_forward_pre_hook(own)
        module.register_forward_hook(sharded)
        return module


class Entries(ParallelStyle):
    """An embedding sharded by entries: [..., T] -> [..., T, C]; other ranks' entries contribute 0
    here.

    DTensor's own embedding computes the gradient of all entries on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(indices: Tensor) -> DTensor:
            weight: Any = module.weight
            first = first_entry(weight)
            local = weight.to_local()
            inside = (indices >= first) & (indices < first + len(local))
            x = F.embedding((indices - first).where(inside, 0), local).where(inside[..., None], 0)
            return scattered(x, device_mesh)

        shard_parameters(module, device_mesh)
        module.forward = forward
        return module


class GatheredNorm(SequenceParallel):
    """The last norm: gather its output, for the logits of each rank's vocabulary entries."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any, x: DTensor) -> DTensor:
            return x.redistribute(placements=[Replicate()])

        module = super()._apply(module, device_mesh)
        module.register_forward_hook(gather)
        return module


def first_entry(x: DTensor, dim: int = 0) -> int:
    """Return the index along ``dim`` of this rank's first entry of ``x``, sharded on a
    one-dimensional mesh.
    """
    chunk = -(-x.shape[dim] // x.device_mesh.size())
    return min(chunk * x.device_mesh.get_local_rank(), x.shape[dim])
