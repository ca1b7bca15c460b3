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

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def split_model(model: nn.Module, mesh: DeviceMesh, *, head_dim: int, kv_heads: int) -> None:
    """Split a transformer on the meta device over the ranks of ``mesh``, in place; before any other parallelism.

    The model has the modules embedding, layers (each attention_norm, attention with wq, wk, wv and wo, mlp_norm, mlp
    with gate, up and down), norm and, unless its output weights are the embedding's, output. It takes tokens [B, T],
    the same on all ranks of ``mesh``, and returns logits [B, T, V] as a DTensor sharded over the vocabulary, which
    ``parallel.vocabulary.cross_entropy_sum`` takes.

    The query heads and the feed-forward width must be multiples of the mesh's size, and ``kv_heads`` a multiple or a
    divisor of it: fewer heads than ranks are kept by every rank, which computes the one that its query heads attend to.
    The vocabulary need not divide: each rank holds V / size entries, rounded up, and the last one the fewer that are
    left, which must be one at least.
    """
    size = mesh.size()
    if size == 1:
        return
    kv = ColwiseParallel() if kv_heads % size == 0 else _OneHead(head_dim, mesh.get_local_rank() * kv_heads // size)
    gather = partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    layer: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        # All matrices of a module share one all-gather of its input.
        "attention": gather(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": kv,
        "attention.wv": kv,
        "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "mlp_norm": SequenceParallel(),
        "mlp": gather(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    plan: dict[str, ParallelStyle] = {f"layers.*.{name}": style for name, style in layer.items()}
    plan |= {"embedding": _Vocabulary(), "norm": _GatheredNorm()}
    if getattr(model, "output", None) is not None:
        plan["output"] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, plan)


class _OneHead(ParallelStyle):
    """A key or value projection of fewer heads than ranks: its weight [G * D, C] is whole on every rank, one head used.

    Each rank's gradient is a part: nought but for its own head, to which other ranks that use it add theirs.
    """

    def __init__(self, head_dim: int, head: int) -> None:
        super().__init__()
        self.rows = slice(head * head_dim, (head + 1) * head_dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: DTensor) -> Tensor:  # [B, T, C] -> [B, T, D]
            weight = module.weight.to_local(grad_placements=[Partial()])  # type: ignore[operator, union-attr]
            return F.linear(x.to_local(grad_placements=[Partial()]), weight[self.rows])

        distribute_module(module, device_mesh)
        module.forward = forward
        return module


class _Vocabulary(ParallelStyle):
    """An embedding whose entries are split; a token that another rank holds adds nought here: [B, T] -> [B, T, C].

    DTensor's own would compute the gradient of all V entries on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(module.weight, mesh, [Shard(0)])  # type: ignore[arg-type]
            module.register_parameter("weight", nn.Parameter(weight))

        def forward(tokens: Tensor) -> DTensor:
            weight: Any = module.weight
            first = first_entry(weight)
            local = weight.to_local()
            inside = (tokens >= first) & (tokens < first + len(local))
            x = F.embedding((tokens - first).where(inside, 0), local).where(inside[..., None], 0)
            return DTensor.from_local(x, device_mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)])

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
