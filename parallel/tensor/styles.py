"""Parallel styles: each splits one module over the tensor-parallel ranks.

parallel/tensor/split.py chooses the style of a module by the word that the model's SPLIT has for
it. Shapes are as in that file.
"""

from collections.abc import Sequence
from typing import Any

import torch
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
from parallel.collectives import SumOverRanks
from runtime.tensors import accum_dtype


def wrap_tokens(x: Tensor, mesh: DeviceMesh) -> Any:
    """Wrap this rank's hidden states in a DTensor sharded over tokens; return token ids as is."""
    if not x.is_floating_point():
        return x
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False)


def reduce_scatter(partial_sums: Tensor, mesh: DeviceMesh) -> DTensor:
    """Sum [..., T, C] over the ranks, and shard the sum over T."""
    partial = DTensor.from_local(partial_sums, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Shard(partial_sums.ndim - 2)])


def shard_parameters(module: nn.Module, mesh: DeviceMesh, dim: int = 0) -> None:
    """Shard a module's direct parameters in place, matrices along ``dim`` and vectors by entries.

    Parameters of its children are not touched.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        shard_dim = dim if parameter.ndim > 1 else 0
        sharded = distribute_tensor(parameter, mesh, [Shard(shard_dim)])
        module.register_parameter(name, nn.Parameter(sharded))


class AllTokens(ParallelStyle):
    """A module that takes all tokens and returns partial sums [B, T, C].

    The style gathers the module's input, which is sharded over T, and sums the outputs into the
    same sharding. So all matrices of the module share one all-gather. The gradient of the gathered
    input is a partial sum on each rank too. With ``plain``, the module's input and output are plain
    tensors of this rank's tokens, not DTensors.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any) -> Any:
            x: Any = wrap_tokens(inputs[0], device_mesh) if self.plain else inputs[0]
            gathered = x.redistribute(placements=[Replicate()])
            return gathered.to_local(grad_placements=[Partial()]), *inputs[1:]

        def scatter(module: nn.Module, inputs: Any, partial_sums: Tensor) -> Tensor:
            x = reduce_scatter(partial_sums, device_mesh)
            return x.to_local() if self.plain else x

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


class Matrix(ParallelStyle):
    """A linear layer split by output channels (dim 0 of the weight) or input channels (dim 1).

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
                bias = bias.to_local() if self.dim == 0 else local_entries(bias)
            return linear(x, weight.to_local(), bias)

        shard_parameters(module, device_mesh, self.dim)
        module.forward = forward
        return module


def local_entries(x: DTensor) -> Tensor:
    """Return a sharded vector with zeros in the entries of other ranks.

    The ranks' results add up to the whole vector.
    """
    first = first_entry(x)
    local = x.to_local()
    return F.pad(local, (first, len(x) - first - len(local)))


class Replicated(ParallelStyle):
    """A replicated linear layer, embedding or RMS norm, applied to this rank's own input.

    Its gradients are partial sums. With ``rows``, only these rows of its weight and bias are used,
    for a key or value projection with fewer heads than ranks. The gradient is then 0 on each rank
    except in the head that the rank uses, and it is summed over the ranks that share the head.
    """

    def __init__(self, rows: slice = slice(None)) -> None:
        super().__init__()
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            parameters: Any = dict(module.named_parameters(recurse=False))
            weights: Any = {}
            for name, parameter in parameters.items():
                weights[name] = parameter.to_local(grad_placements=[Partial()])[self.rows]
            if type(module) is nn.RMSNorm:
                normalized_shape = list(module.normalized_shape)
                return F.rms_norm(x, normalized_shape, weights["weight"], module.eps)
            if isinstance(module, nn.Embedding):
                return F.embedding(x, **weights)
            if isinstance(module, nn.Linear):
                return linear(x, **weights)
            out: Tensor = plain_forward(x, **weights)
            return out

        plain_forward: Any = module.forward  # for the model's own norms, which take a weight
        distribute_module(module, device_mesh)
        module.forward = forward
        return module


class PerHead(ParallelStyle):
    """Splits the named per-head attributes of a module; each rank keeps those of its heads.

    Parameters must be vectors, and are sharded; the module's forward receives this rank's entries
    as keyword arguments.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        owner: Any = module
        size = device_mesh.size()
        rank = device_mesh.get_local_rank()
        parameters: list[str] = []
        for name in self.names:
            value = getattr(owner, name)
            if isinstance(value, nn.Parameter):
                sharded = distribute_tensor(value, device_mesh, [Shard(0)])
                owner.register_parameter(name, nn.Parameter(sharded))
                parameters.append(name)
            elif isinstance(value, int):
                setattr(owner, name, value // size)
            elif value is not None:
                heads = len(value) // size
                setattr(owner, name, value[rank * heads : (rank + 1) * heads])
        if not parameters:
            return module

        def forward(*inputs: Any) -> Any:
            # Read in every call, since FSDP replaces the parameters.
            local = {name: getattr(owner, name).to_local() for name in parameters}
            return plain_forward(*inputs, **local)

        plain_forward = owner.forward
        owner.forward = forward
        return module


class JointNorm(ParallelStyle):
    """An RMS norm over the channels of all heads, with the heads split over the ranks.

    The input is [..., C / size] or [..., H / size, D]. The ranks add up their sums of squares and,
    in the backward pass, the gradients of the total. The result is rounded once, from float32 or
    wider.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            accum = x.to(accum_dtype(x.dtype))
            if accum.shape[-1] * size != channels:
                accum = accum.flatten(-2)  # [..., H / size, D] to [..., C / size]
            local_squares = accum.square().sum(-1, keepdim=True)
            squares = SumOverRanks.apply(local_squares, device_mesh.get_group())
            out = accum * torch.rsqrt(squares / channels + eps)
            weight: Any = module.weight
            if weight is not None:
                out = out * weight.to_local().to(accum.dtype)
            return out.to(x.dtype).view_as(x)

        eps: Any = module.eps
        normalized_shape: Any = module.normalized_shape
        (channels,) = normalized_shape
        size = device_mesh.size()
        shard_parameters(module, device_mesh)
        module.forward = forward
        return module


class LocalTokens(ParallelStyle):
    """A function of positions without parameters, [..., T] -> [..., T, C], such as rope.

    Each rank computes it only for its own tokens.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def chunk(module: nn.Module, inputs: Any) -> Any:
            chunks = inputs[0].chunk(device_mesh.size(), -1)
            return chunks[device_mesh.get_local_rank()], *inputs[1:]

        def wrap(module: nn.Module, inputs: Any, x: Tensor) -> DTensor:
            return DTensor.from_local(x, device_mesh, [Shard(x.ndim - 2)], run_check=False)

        module.register_forward_pre_hook(chunk)
        module.register_forward_hook(wrap)
        return module


class Entries(ParallelStyle):
    """An embedding sharded by vocabulary entries: [..., T] -> [..., T, C].

    Each rank contributes 0 for the entries of other ranks. DTensor's own embedding would compute
    the gradient of all entries on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(indices: Tensor) -> DTensor:
            weight: Any = module.weight
            first = first_entry(weight)
            local = weight.to_local()
            inside = (indices >= first) & (indices < first + len(local))
            x = F.embedding((indices - first).where(inside, 0), local)
            return reduce_scatter(x.where(inside[..., None], 0), device_mesh)

        shard_parameters(module, device_mesh)
        module.forward = forward
        return module


class GatheredNorm(SequenceParallel):
    """A model's last norm; its output is gathered, since each rank's logits need all tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any, x: DTensor) -> DTensor:
            return x.redistribute(placements=[Replicate()])

        module = super()._apply(module, device_mesh)
        module.register_forward_hook(gather)
        return module


def first_entry(x: DTensor, dim: int = 0) -> int:
    """Return the index along ``dim`` of this rank's first entry of ``x``.

    ``x`` must be sharded along ``dim`` on a one-dimensional mesh.
    """
    chunk = -(-x.shape[dim] // x.device_mesh.size())
    return min(chunk * x.device_mesh.get_local_rank(), x.shape[dim])
