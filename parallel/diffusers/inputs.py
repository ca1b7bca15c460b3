"""Ensure that ranks that share a clip have the same latents, noise, timestep and text.

The ranks compute one loss together. If one of them drew different noise, there would be no error:
the attention would mix two clips, and the loss would look normal.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from parallel.collectives import device_of, find_difference
from runtime.errors import UserError


def check_same(arguments: Any, group: dist.ProcessGroup | None) -> None:
    """Raise UserError on all ranks of the group if a tensor differs between ranks. Collective."""
    leaves, _ = tree_flatten_with_path(arguments)
    tensors = {keystr(path): x for path, x in leaves if isinstance(x, Tensor)}
    difference = find_difference(tensors, group)
    if difference is not None:
        raise UserError(
            f"inputs {', '.join(difference.names)} of the group's ranks {difference.ranks} differ "
            "from those of its rank 0; draw them with equally seeded generators, use "
            "cp.noise_like, or send those of rank 0 with cp.batch"
        )


def send_first(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the value of the group's rank 0, with its tensors, on every rank. Collective.

    Tensors may be in nested lists, tuples and dicts. They arrive on the type of device that they
    are on at rank 0. The other ranks may pass any value.
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
    """Shape, dtype and device type of a tensor, which other ranks need to receive it."""

    def __init__(self, x: Tensor) -> None:
        self.shape = x.shape
        self.dtype = x.dtype
        self.device_type = x.device.type


def _describe(x: Any) -> Any:
    return _Shape(x) if isinstance(x, Tensor) else x
