"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022, section 4.2.2).

The tp ranks hold the same tokens. Each computes some heads of every attention, some columns of every feed-forward
layer and the logits of some vocabulary entries. In between, where a token's channels are needed whole (norms, residual
sums), each holds some of the tokens: what was an all-reduce is a reduce-scatter and an all-gather of the same traffic.
It stays on whenever tp > 1: then every parameter is a DTensor, and a norm's gradient, of which each rank has a part, is
summed.

Shapes: B sequences, T tokens of this context-parallel rank (a multiple of tp), C width of the residual stream, G key
and value heads, D width of a head, V vocabulary entries. ``Shard(1)`` of [B, T, C] is over tokens, ``Shard(-1)`` over
channels.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel, parallelize_module


def split_model(model: nn.Module, mesh: DeviceMesh, *, head_dim: int, kv_heads: int) -> None:
    """Split a transformer on the meta device over the ranks of ``mesh``, in place; before any other parallelism.

    The model may have the modules embedding, position_embedding or sinusoids, layers (each attention_norm, attention
    with wq, wk, wv and wo, mlp_norm, mlp with up, down and perhaps gate), norm and output; with biases or without. An
    attention may have log_decay, a number per head, and the modules wu, a gate; lrpe, angles theta of every head; norm,
    an RMS norm without a weight over all heads. The model takes tokens [B, T], the same on all ranks of ``mesh``, and
    returns logits [B, T, V] as a DTensor sharded over the vocabulary, which ``parallel.vocabulary.cross_entropy_sum``
    takes.

    A pipeline stage lacks some of these. What passes between two stages is hidden states of this rank's tokens
    [B, T / size, C], a plain tensor.

    The query heads and the feed-forward width must be multiples of the mesh's size, and ``kv_heads`` a multiple or a
    divisor of it: fewer heads than ranks are kept by every rank, which computes the one that its query heads attend to.
    The vocabulary and the table of positions need not divide: each rank holds V / size entries, rounded up, and the
    last one the fewer that are left, which must be one at least.

    Raises:
        ValueError: the model has a parameter in a module that is none of these.
    """
    size = mesh.size()
    if size == 1:
        return
    heads = _Matrix(0) if kv_heads % size == 0 else _OneHead(head_dim, mesh.get_local_rank() * kv_heads // size)
    styles: dict[str, ParallelStyle] = {
        "embedding": _Entries(),
        "position_embedding": _Entries(),
        "sinusoids": _OwnTokens(),
        "attention_norm": SequenceParallel(),
        "attention": _OwnHeads(),
        "attention.wq": _Matrix(0),
        "attention.wk": heads,
        "attention.wv": heads,
        "attention.wu": _Matrix(0),
        "attention.lrpe": _Angles(),
        "attention.norm": _JointNorm(),
        "attention.wo": _Matrix(1),
        "mlp_norm": SequenceParallel(),
        "mlp": _AllTokens(),
        "mlp.gate": _Matrix(0),
        "mlp.up": _Matrix(0),
        "mlp.down": _Matrix(1),
        "norm": _GatheredNorm(),
        "output": ColwiseParallel(use_local_output=False),
    }
    _apply(model, mesh, styles)
    model.register_forward_pre_hook(lambda _, inputs: (_of_tokens(inputs[0], mesh), *inputs[1:]))
    if getattr(model, "norm", None) is None:
        # A copy, since FSDP warns of a view.
        model.register_forward_hook(lambda _, inputs, x: x.to_local().clone())


def split_dit(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a diffusion transformer, as ``split_model`` a language model.

    The model may have the modules x_embedder, t_embedder, y_embedder, layers (each attention with wq, wk, wv and wo,
    mlp with up and down, adaLN_modulation) and final_layer. It takes patches [B, T, P], positions [T], times and labels
    [B], by position and the same on all ranks of ``mesh``, and returns patches [B, T, P'], whole on all of them. What
    passes between two stages is hidden states of this rank's patches [B, T / size, C].

    Conditions [B, C] are the same on all ranks, which modulate their own patches alone: the gradients of all that makes
    them and the modulations are parts, and are summed.

    The heads and the feed-forward width must be multiples of the mesh's size.

    Raises:
        ValueError: the model has a parameter in a module that is none of these.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    if size == 1:
        return
    whole = ("x_embedder", "t_embedder.mlp.0", "t_embedder.mlp.2", "y_embedder", "adaLN_modulation.1")
    final = ("final_layer.adaLN_modulation.1", "final_layer.linear")
    styles: dict[str, ParallelStyle] = dict.fromkeys((*whole, *final), _Whole())
    styles |= dict.fromkeys(("attention", "mlp"), _AllTokens(plain=True))
    styles |= dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "mlp.up"), _Matrix(0))
    styles |= dict.fromkeys(("attention.wo", "mlp.down"), _Matrix(1))
    _apply(model, mesh, styles)
    if getattr(model, "x_embedder", None) is not None:
        model.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].chunk(size, 1)[rank], inputs[1].chunk(size)[rank], *inputs[2:])
        )
    if getattr(model, "final_layer", None) is not None:
        model.register_forward_hook(lambda _, inputs, x: _of_tokens(x, mesh).full_tensor().clone())


def _apply(model: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    """Split the modules of these names, of each layer and of the rest. ValueError for a parameter in no such module."""
    names = {name: re.sub(r"^layers\.[^.]+\.", "", name) for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: styles[kind] for name, kind in names.items() if kind in styles})
    if left := [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]:
        raise ValueError(f"tensor parallelism knows no way to split {', '.join(left)}; parallel/tensor.py has the plan")


def _of_tokens(x: Tensor, mesh: DeviceMesh) -> Any:
    """Hidden states of this rank's tokens as a part of all; token ids, which all ranks have, as they are."""
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False) if x.is_floating_point() else x


def _scatter(part: Tensor, mesh: DeviceMesh) -> DTensor:
    """The sum over ranks of ``part`` [..., T, C], sharded over T."""
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(part.ndim - 2)])


class _AllTokens(ParallelStyle):
    """A module that needs all tokens and gives parts of a sum: [B, T, C], sharded over T outside, plain inside.

    All matrices of the module share one all-gather of its input. Each rank's gradient of that is a part of a sum too.
    With ``plain`` what is outside are plain tensors of this rank's tokens.
    """

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: Any) -> Any:
            x: Any = _of_tokens(inputs[0], device_mesh) if self.plain else inputs[0]
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]), *inputs[1:]

        def scatter(module: nn.Module, inputs: Any, part: Tensor) -> Tensor:
            x = _scatter(part, device_mesh)
            return x.to_local() if self.plain else x

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


class _OwnHeads(_AllTokens):
    """An attention, of whose decays per head, where it has any, each rank keeps those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rates: Any = getattr(module, "log_decay", None)
        if rates is not None:
            own, rank = len(rates) // device_mesh.size(), device_mesh.get_local_rank()
            module.log_decay = rates[rank * own : (rank + 1) * own]
        return super()._apply(module, device_mesh)


class _Matrix(ParallelStyle):
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
    """This rank's entries of a sharded vector, and noughts in the place of the others."""
    first, local = first_entry(x), x.to_local()
    return F.pad(local, (first, len(x) - first - len(local)))


class _Whole(ParallelStyle):
    """A linear layer or an embedding that every rank has whole and applies to what is its own; gradients are parts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            own: Any = {name: p.to_local(grad_placements=[Partial()]) for name, p in module.named_parameters()}  # type: ignore[attr-defined]
            return F.embedding(x, **own) if isinstance(module, nn.Embedding) else F.linear(x, **own)

        distribute_module(module, device_mesh)
        module.forward = forward
        return module


class _OneHead(ParallelStyle):
    """A key or value projection of fewer heads than ranks: its weight [G * D, C] is whole on every rank, one head used.

    Each rank's gradient is a part: nought but for its own head, to which other ranks that use it add theirs.
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


class _Angles(ParallelStyle):
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


class _JointNorm(ParallelStyle):
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
            raise ValueError("a norm over all heads is split without a weight alone; parallel/tensor.py has the plan")
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


class _OwnTokens(ParallelStyle):
    """A function of positions [..., T] without parameters: [..., T, C], of this rank's tokens alone."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own(module: nn.Module, inputs: Any) -> Any:
            return inputs[0].chunk(device_mesh.size(), -1)[device_mesh.get_local_rank()], *inputs[1:]

        def sharded(module: nn.Module, inputs: Any, x: Tensor) -> DTensor:
            return DTensor.from_local(x, device_mesh, [Shard(x.ndim - 2)], run_check=False)

        module.register_forward_pre_hook(own)
        module.register_forward_hook(sharded)
        return module


class _Entries(ParallelStyle):
    """An embedding whose entries are split: [..., T] -> [..., T, C]; one that another rank holds adds nought here.

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
            return _scatter(x, device_mesh)

        distribute_module(module, device_mesh, split)
        module.forward = forward
        return module


class _GatheredNorm(SequenceParallel):
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
