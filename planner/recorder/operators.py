"""Operators that the recorder treats specially: collectives, kernels, and those on real tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernels.backends.base import AttentionKernel
from planner.layers.delta_cost import DeltaShape


def _all_but_own(num_ranks: int) -> float:
    """Return the share of a tensor that a rank sends if its own part stays."""
    return (num_ranks - 1) / num_ranks


SENT: dict[str, tuple[int, Callable[[int], float]]] = {
    "c10d::_allgather_base_": (0, _all_but_own),
    "c10d::_reduce_scatter_base_": (1, _all_but_own),
    "c10d::allreduce_": (0, lambda n: 2 * _all_but_own(n)),
    "c10d::alltoall_base_": (1, _all_but_own),
    "c10d::send": (0, lambda n: 1.0),
    "_c10d_functional::all_gather_into_tensor": (0, lambda n: n - 1.0),
    "_c10d_functional::reduce_scatter_tensor": (0, _all_but_own),
    "_c10d_functional::all_reduce": (0, lambda n: 2 * _all_but_own(n)),
    "_c10d_functional::all_to_all_single": (0, _all_but_own),
}
"""Traffic of each operator: the index of the argument that it sends, and a function of the number
of ranks that returns the share of this argument that each rank sends.
"""


def bytes_sent(func: Any, args: Any, rank: int) -> tuple[float, list[int]]:
    """Return the bytes that a rank sends in a collective or a message, and the ranks in it.

    In an all-to-all of unequal parts a rank sends all but its part for itself.
    """
    from torch.distributed._tools.fake_collectives import CollectiveOp

    name = func.name()
    ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
    argument, share_of = SENT[name.partition(".")[0]]
    share = share_of(len(ranks))
    if name.startswith("c10d::alltoall_base_") and sum(args[4]):  # the parts, if they are unequal
        share = 1 - args[4][ranks.index(rank)] / sum(args[4])
    if name.startswith("c10d::send"):
        ranks = [rank, ranks[args[2]]]
    return share * sum(x.nbytes for x in tree_leaves(args[argument])), ranks


SILENT = ("c10d::recv_", "c10d::barrier", "_c10d_functional::wait_tensor")
"""Communication operators that send nothing."""
SCANS = ("longmesh::linear_attention", "longmesh::state_attention")
"""Operators replaced by their shape functions: their own code is a loop over the tokens."""
STATEFUL = "longmesh::slice_attention"
"""Operator that also reads and writes tensors other than its arguments, so every call is run."""
SHAPES = AttentionKernel(
    "shapes",
    lambda q, k, v, *_: (torch.empty_like(q), torch.empty_like(q[..., 0], dtype=torch.float32)),
    lambda rows, keys, *_: (
        torch.empty_like(rows.q),
        torch.empty_like(keys.k),
        torch.empty_like(keys.v),
    ),
)
"""Attention kernel that only allocates its results, with a GPU kernel's shapes and dtypes."""


def _slab_backward(inputs: tuple[Tensor, ...], dout: Tensor, leaving: Tensor, *_: Any) -> Tensor:
    """Allocate the workspace of a delta rule's backward pass; return an empty state gradient."""
    q = inputs[0]
    v = inputs[2]
    key_heads, key_dim = q.shape[2:]
    batch, tokens, value_heads, value_dim = v.shape
    shape = DeltaShape(key_heads, value_heads, key_dim, value_dim, taps=1)
    leaving.new_empty(shape.workspace(batch, tokens) // 4, dtype=torch.float32)
    return torch.empty_like(leaving)


SLABS = (lambda *_: None, _slab_backward)
"""Forward and backward pass of a delta rule over a slab (a range of chunks), without computing."""


def is_on_real_tensors(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operator has only real or meta tensors, and is therefore computed.

    Factories of tensors, and ``to_empty`` from the meta device, make fake tensors instead.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    device = kwargs.get("device")
    takes_meta = any(tensor.is_meta for tensor in tensors) or not tensors
    if takes_meta and device:
        return bool(device.type == "meta")
    return bool(tensors)
