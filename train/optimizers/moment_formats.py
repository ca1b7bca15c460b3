"""Formats in which AdamW's moments are stored between steps.

A step reads a moment as float32, updates it in float32, and stores it again (pieces.py). A format
with blocks has one float32 scale for each block of consecutive elements of a row; rows are those of
the whole parameter, so blocks are the same however ranks shard the rows. The scales are a matrix
``[rows, blocks per row]``, sharded like the parameter, under the moment's name with ``_scale``.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from parallel.data import to_local

MomentDtype = Literal["fp32", "bf16", "fp8", "int8"]
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments, in torch and in checkpoints."""
SCALE = "_scale"
"""Suffix of the name of a moment's scales."""
LONGEST_BLOCK = 256
"""Number of elements of a block, as in torchao and bitsandbytes, if it divides a rank's rows."""
SHORTEST_BLOCK = 64
"""Minimum number of elements of a block: a shorter one would take 1/16 byte and more per element.

A parameter whose rows have no divisor from here to LONGEST_BLOCK keeps float32 moments.
"""
SMALLEST = 4096
"""Number of elements below which a parameter keeps float32 moments, as in torchao."""


class MomentFormat(ABC):
    """Format of a stored moment; ``stored`` are its values and, with blocks, its scales.

    Each optimizer has formats of its own, which may keep tensors on its device.
    """

    name: MomentDtype
    dtype: torch.dtype
    """Dtype of the stored tensor that has the parameter's shape."""
    blocks: bool = False
    """True if blocks of elements have scales."""
    random: bool = False
    """True if rounding takes random bits."""
    rounding_bytes: int = 0
    """Bytes per element of temporary tensors while values are rounded, beside both moments."""

    @property
    def bytes(self) -> float:
        """Bytes per element."""
        return self.dtype.itemsize + 4 / LONGEST_BLOCK * self.blocks

    @abstractmethod
    def unpack(self, stored: tuple[Tensor, ...], moment: str) -> Tensor:
        """Return the float32 values ``[n]``; float32 values are returned themselves."""

    @abstractmethod
    def pack(
        self, values: Tensor, stored: tuple[Tensor, ...], moment: str, bits: Tensor | None = None
    ) -> None:
        """Round float32 ``values`` ``[n]`` into ``stored``.

        Args:
            bits: random 16-bit numbers, int64 ``[n]``, for formats that are ``random``; without
                them values are rounded to nearest.
        """


class Float32(MomentFormat):
    """Moments as they are computed."""

    name = "fp32"
    dtype = torch.float32

    def unpack(self, stored: tuple[Tensor, ...], moment: str) -> Tensor:
        return stored[0]

    def pack(
        self, values: Tensor, stored: tuple[Tensor, ...], moment: str, bits: Tensor | None = None
    ) -> None:
        if values is not stored[0]:
            stored[0].copy_(values)


def block_length(parameter: Tensor) -> int | None:
    """Return the number of elements per block; None if the moments have to stay in float32.

    A row is a slice of the first dimension, flattened. The length is the largest divisor of a
    rank's part of a row that is at most LONGEST_BLOCK. All ranks get the same answer.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if parameter.ndim < 2 or parameter.numel() < SMALLEST:
        return None
    row = parameter.shape[1:].numel()
    parts = 1
    if isinstance(parameter, DTensor):
        sizes = parameter.device_mesh.shape
        for placement, size in zip(parameter.placements, sizes, strict=True):
            if not isinstance(placement, Shard | _StridedShard) or placement.dim == 0:
                continue
            if placement.dim > 1 or parameter.shape[1] % (parts * size):
                return None
            parts *= size
    lengths = range(min(LONGEST_BLOCK, row // parts), SHORTEST_BLOCK - 1, -1)
    return next((length for length in lengths if row // parts % length == 0), None)


def zeros(parameter: Tensor, dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """Return zeros sharded like a parameter, of its shape or of ``[rows, columns]``."""
    from torch.distributed.tensor import DTensor

    shape = list(parameter.shape)
    local_shape = list(to_local(parameter).shape)
    if columns is not None:
        parts = shape[1] // max(1, local_shape[1])
        shape = [shape[0], columns]
        local_shape = [local_shape[0], columns // parts]
    local = torch.zeros(local_shape, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
