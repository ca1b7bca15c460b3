"""Inputs of ranks that share a clip: the same latents, noise, time and text on each of them.

The ranks compute one loss. If one of them drew other noise, nothing would fail: the attention would
mix two clips, and the loss would look as usual.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from runtime.errors import UserError

PERIOD = 65521
"""Weights of a checksum repeat after this many elements, which keeps sums small."""


def check_same(arguments: Any, group: dist.ProcessGroup | None) -> None:
    """Raise UserError on all ranks of the group if a tensor differs between them. Collective.

    Ranks compare checksums, which are one number for a rank unless they differ.
    """
    if group is None:
        return
    tensors = {keystr(path): x for path, x in tree_flatten_with_path(arguments)[0] if _is_data(x)}
    checksums = {name: _checksum(x) for name, x in tensors.items()}
    device = _device(group)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for checksum in checksums.values():
        total = total + checksum.to(device)
    totals = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
    dist.all_gather(totals, total, group=group)
    bits = torch.stack(totals).view(torch.int64)  # NaN equals itself
    if bool((bits == bits[0]).all()):
        return

    described = {name: (tuple(tensors[name].shape), float(x)) for name, x in checksums.items()}
    gathered: list[Any] = [None] * len(totals)
    dist.all_gather_object(gathered, described, group=group)
    names = {name for other in gathered for name in other}
    different = sorted(
        name
        for name in names
        if any(other.get(name) != gathered[0].get(name) for other in gathered)
    )
    ranks = [rank for rank, other in enumerate(gathered) if other != gathered[0]]
    raise UserError(
        f"inputs {', '.join(different)} of the group's ranks {ranks} are not those of its rank 0; "
        "draw them with the same generator, use cp.noise_like, or send rank 0's with cp.batch"
    )


def _is_data(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() > 0


def _checksum(x: Tensor) -> Tensor:
    """Return the sum of the elements, each weighed by its index, and of the sizes."""
    values = torch.view_as_real(x) if x.is_complex() else x
    values = values.detach().flatten().double()
    weights = torch.arange(len(values), device=x.device) % PERIOD + 1
    size_sum = sum(size * (dim + 2) for dim, size in enumerate(x.shape))
    return (values * weights).sum() + size_sum


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

    device = _device(group)
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


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that the group's backend sends from."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
