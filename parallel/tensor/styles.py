"""How one module of a model is split over the tp ranks: what parallel/tensor/split.py's plans are made of.

Shapes as there.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel


def of_tokens(x: Tensor, mesh: DeviceMesh) -> Any:
    """Hidden states of this rank's tokens as a part of all; token ids, which all ranks have, as they are."""
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False) if x.is_floating_point() else x


def scattered(part: Tensor, mesh: DeviceMesh) -> DTensor:
    """The sum over ranks of ``part`` [..., T, C], sharded over T."""
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(part.ndim - 2)])


class AllTokens(ParallelStyle):
    """A module that needs all tokens and gives parts of a sum: [B, T, C], sharded over T outside, plain inside.

    All matrices of the module share one all-gather of its input. Each rank's gradient of that is a part of a sum too.
    With ``plain`` what is outside are plain tensors of this rank's tokens.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any) -> Any:
            x: Any = of_tokens(inputs[0], device_mesh) if self.plain else inputs[0]
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]), *inputs[1:]

        def scatter(module: nn.Module, inputs: Any, part: Tensor) -> Tensor:
            x = scattered(part, device_mesh)
            return x.to_local() if self.plain else x

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


class OwnHeads(AllTokens):
    """An attention, of whose decays per head, where it has any, each rank keeps those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rates: Any = getattr(module, "log_decay", None)
        if rates is not None:
            own, rank = len(rates) // device_mesh.size(), device_mesh.get_local_rank()
            module.log_decay = rates[rank * own : (rank + 1) * own]
        return super()._apply(module, device_mesh)


class Matrix(ParallelStyle):
    """A projection split by its output channels (dim 0 of its weight), or by its input channels (1).

    The latter gives parts of a sum, and each rank adds the bias of some output channels to its own.
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
            return F.linear(x, weight.to_local(), bias)

        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter, device_mesh, [Shard(self.dim if name == "weight" else 0)])
            module.register_parameter(name, nn.Parameter(split))
        module.forward = forward
        return module


def own_entries(x: DTensor) -> Tensor:
    """This rank's entries of a sharded vector, and zeros in the place of the others."""
    first, local = first_entry(x), x.to_local()
    return F.pad(local, (first, len(x) - first - len(local)))


class Whole(ParallelStyle):
    """A linear layer or an embedding that every rank has whole and applies to what is its own; gradients are parts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            own: Any = {name: p.to_local(grad_placements=[Partial()]) for name, p in module.named_parameters()}  # type: ignore[attr-defined]
            return F.embedding(x, **own) if isinstance(module, nn.Embedding) else F.linear(x, **own)

        distribute_module(module, device_mesh)
        module.forward = forward
        return module


class OneHead(ParallelStyle):
    """A key or value projection of fewer heads than ranks: its weight [G * D, C] is whole on every rank, one head used.

    Each rank's gradient is a part: 0 but for its own head, to which other ranks that use it add theirs.
    """

    def __init__(self, head_dim: int, head: int) -> None:
        super().__init__()
        self.rows = slice(head * head_dim, (head + 1) * head_dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, D]
            whole = (module.weight, module.bias)
            own: Any = (p if p is None else p.to_local(grad_placements=[Partial()])[self.rows] for p in whole)  # type: ignore[operator, union-attr]
            return F.linear(x, *own)

        distribute_module(module, device_mesh)
        module.forward = forward
        return module


class Angles(ParallelStyle):
    """Angles of positions [H * D], of which each rank has those of its heads; ``turn`` is the module's computation."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(q: Tensor, k: Tensor, positions: Tensor) -> Any:
            return turn(q, k, theta().to_local(), positions)

        whole: Any = module.theta
        turn: Any = module.turn
        module.register_parameter("theta", nn.Parameter(distribute_tensor(whole, device_mesh, [Shard(0)])))

        def theta() -> Any:  # asked for at every call: FSDP puts another in its place
            return module.theta

        module.forward = forward
        return module


class JointNorm(ParallelStyle):
    """An RMS norm without a weight over the channels of all heads, of which each rank has some: [..., C / size].

    Ranks add up their squares, and backwards what reaches these. In float32 at least, rounded once.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            squares = _Sum.apply(wide.square().sum(-1, keepdim=True), device_mesh.get_group())
            channels = x.shape[-1] * device_mesh.size()
            return (wide * torch.rsqrt(squares / channels + eps)).to(x.dtype)

        eps: Any = module.eps
        if next(module.parameters(), None) is not None:
            raise ValueError(
                "a norm over all heads is split without a weight alone; parallel/tensor/split.py has the plan"
            )
        module.forward = forward
        return module


class _Sum(torch.autograd.Function):
    """The sum over ranks, of which each makes something of its own: the gradients of these are summed as well."""

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
    """A function of positions [..., T] without parameters: [..., T, C], of this rank's tokens alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own(module: nn.Module, inputs: Any) -> Any:
            return inputs[0].chunk(device_mesh.size(), -1)[device_mesh.get_local_rank()], *inputs[1:]

        def sharded(module: nn.Module, inputs: Any, x: Tensor) -> DTensor:
            return DTensor.from_local(x, device_mesh, [Shard(x.ndim - 2)], run_check=False)

        module.register_forward_pre_hook(own)
        module.register_forward_hook(sharded)
        return module


class Entries(ParallelStyle):
    """An embedding whose entries are split: [..., T] -> [..., T, C]; one that another rank holds adds 0 here.

    DTensor's own would compute the gradient of all entries on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(module.weight, mesh, [Shard(0)])  # type: ignore[arg-type]
            module.register_parameter("weight", nn.Parameter(weight))

        def forward(indices: Tensor) -> DTensor:
            weight: Any = module.weight
            first = first_entry(weight)
            local = weight.to_local()
            inside = (indices >= first) & (indices < first + len(local))
            x = F.embedding((indices - first).where(inside, 0), local).where(inside[..., None], 0)
            return scattered(x, device_mesh)

        distribute_module(module, device_mesh, split)
        module.forward = forward
        return module


class GatheredNorm(SequenceParallel):
    """The last norm: its output is whole on every rank, for the logits of each rank's vocabulary entries."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any, x: DTensor) -> DTensor:
            return x.redistribute(placements=[Replicate()])

        module = super()._apply(module, device_mesh)
        module.register_forward_hook(gather)
        return module


def first_entry(x: DTensor, dim: int = 0) -> int:
    """Index along ``dim`` of the first entry that this rank holds of ``x``, which a mesh of one dimension shards."""
    chunk = -(-x.shape[dim] // x.device_mesh.size())
    return min(chunk * x.device_mesh.get_local_rank(), x.shape[dim])
