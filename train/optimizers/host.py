"""AdamW with its moments in host memory.

The moments come to the device one piece at a time, while the piece before is updated. Two streams
carry the copies: "back" to the device, and "out" of it. The host waits for nothing; the events
below order the streams:

* back waits for the computation before the step, whose memory it may write to;
* the computation waits for back before it updates a piece;
* out waits for the computation, which has written the updated moments;
* back waits for out before it reuses the buffers of the piece before the last;
* the computation waits for out after the last pieces, so that all moments are in host memory for
  whatever follows the step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel import offload
from parallel.data import to_local
from parallel.offload import HostCopies, Slabs
from runtime.simulation import allocates
from train.optimizers import pieces
from train.optimizers.base import StepPiece
from train.optimizers.moment_formats import MomentFormat, zeros
from train.optimizers.pieces import ParameterPiece, PiecewiseAdamW

PIECE = 1 << 24
"""Number of elements of a parameter that are updated at once if moments are in float32.

Both moments of two pieces take 256 MiB on the device. One copy moves one moment of a piece, 64 MiB,
which is large enough for a bus to reach its full rate.
"""


def offload_piece(formats: Sequence[MomentFormat]) -> StepPiece:
    """Return a piece of a step whose moments pass through buffers of the device."""
    piece = pieces.rounding_piece(formats)
    stored_bytes = sum(moment_format.bytes for moment_format in formats)
    return StepPiece(piece.elements or PIECE, 2 * stored_bytes + piece.bytes)


class HostAdamW(PiecewiseAdamW):
    """A fused AdamW with its moments in host memory; its results equal those on the device.

    For a GPU the memory is pinned. A step moves 8 bytes each way for every parameter of this rank
    with moments in float32, and takes as long as the slower direction.
    """

    _copies: HostCopies | None = None
    _slabs: Slabs | None = None

    def _zeros(self, parameter: Tensor, dtype: torch.dtype, columns: int | None) -> Tensor:
        self._slabs = self._slabs or Slabs()
        return on_host(parameter, self._slabs, dtype, columns)

    def _piece_length(self) -> int:
        return offload_piece(tuple(self.formats.values())).elements

    def _update(self, pieces: list[ParameterPiece]) -> None:
        device = pieces[0].weight.device
        self._copies = copies = self._copies or HostCopies(device)
        compute = copies.compute

        # Two buffers for each stored tensor: one is filled while the other is updated.
        largest: list[int] = []
        for piece in pieces:
            sizes = [tensor.nbytes for tensor in piece.stored]
            largest += [0] * (len(sizes) - len(largest))
            for number, size in enumerate(sizes):
                largest[number] = max(largest[number], size)
        buffers: list[list[Tensor]] = []
        for _ in range(2):
            buffers.append(
                [torch.empty(size, dtype=torch.uint8, device=device) for size in largest]
            )
        # The event after which each set of buffers may be overwritten.
        free: list[Any] = [compute.record_event(), None]

        def copy_in(number: int) -> tuple[list[Tensor], Any]:
            """Start to copy a piece's moments to the device; return the copies and their event."""
            stored = pieces[number].stored
            on_device = []
            for buffer, x in zip(buffers[number % 2], stored, strict=False):
                on_device.append(buffer[: x.nbytes].view(x.dtype))
            pairs = zip(on_device, stored, strict=True)
            return on_device, copies.back(pairs, after=free[number % 2])

        following = copy_in(0)
        for number, piece in enumerate(pieces):
            stored, arrived = following
            if number + 1 < len(pieces):
                following = copy_in(number + 1)
            compute.wait_event(arrived)
            self._apply(piece, stored)
            free[number % 2] = copies.out(zip(piece.stored, stored, strict=True))

        for event in free[: len(pieces)]:
            compute.wait_event(event)


@allocates(offload.MOMENTS)
def on_host(
    parameter: Tensor, slabs: Slabs, dtype: torch.dtype = torch.float32, columns: int | None = None
) -> Tensor:
    """Return zeros in host memory, sharded like the parameter; cut from ``slabs`` for a GPU.

    Their shape is the parameter's, or ``[rows, columns]``.
    """
    if parameter.device.type == "cpu":
        return zeros(parameter, dtype, columns)
    return cut(parameter, slabs, dtype, columns)


def cut(
    parameter: Tensor, slabs: Slabs, dtype: torch.dtype = torch.float32, columns: int | None = None
) -> Tensor:
    """Return zeros like a parameter, in memory cut from ``slabs`` (large host buffers)."""
    like = parameter
    if columns is not None:
        like = zeros(parameter, dtype, columns)
    moment = torch.empty_like(like, dtype=dtype, device="cpu")
    shard = to_local(moment)
    if shard.numel():
        memory = slabs.empty(shard.nbytes, pinned=parameter.device.type != "cpu")
        shard.set_(memory.untyped_storage(), 0, shard.shape, shard.stride()).zero_()
    return moment
