"""Inputs of ranks that share a clip: the same latents, noise, time and text on each of them.

The ranks compute one loss. If one of them drew other noise, nothing would fail: the attention would
mix two clips, and the loss would look as usual.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from parallel.collectives import device_of, find_difference
from runtime.errors import UserError


def check_same(arguments: Any, group: dist.ProcessGroup | None) -> None:
    """Raise UserError on all ranks of the group if a tensor differs between them. Collective."""
    leaves, _ = tree_flatten_with_path(arguments)
    tensors = {keystr(path): x for path, x in leaves if isinstance(x, Tensor)}
    difference = find_difference(tensors, group)
    if difference is not None:
        raise UserError(
            f"inputs {', '.join(difference.names)} of the group's ranks {difference.ranks} are not "
            "those of its rank 0; draw them with the same generator, use cp.noise_like, or send "
            "rank 0's with cp.batch"
        )


def send_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the group's rank 0's tensors on every rank, in any nesting. Collective.

    The other ranks may pass anything. Tensors arrive on the kind of device that they have on rank
    0.
    """
    if group is None:
        return value
    leaves, structure = tree_flatten(value)
    described: list[Any] = [None]
    is_first = dist.get_rank(group) == 0
    if is_first:
        described = [(structure, [_describe(x) for x in leaves])]
    dist.broadcast_object_list(described, group=group, group_src=0)
    structure, descriptions = described[0]

    device = device_of(group)
    sent = []
    for index, description in enumerate(descriptions):
        if not isinstance(description, _Shape):
            sent.append(description)
            continue
        if is_first:
            tensor = leaves[index].detach().to(device).contiguous()
        else:
            tensor = torch.empty(description.shape, dtype=description.dtype, device=device)
        dist.broadcast(tensor, group=group, group_src=0)
        sent.append(tensor.to(description.device_type))
    return tree_unflatten(sent, structure)


class _Shape:
    """Shape, dtype and kind of device, which another rank needs to receive a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.shape = x.shape
        self.dtype = x.dtype
        self.device_type = x.device.type


def _describe(x: Any) -> Any:
    return _Shape(x) if isinstance(x, Tensor) else x
