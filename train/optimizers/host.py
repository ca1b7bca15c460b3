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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel import offload
from parallel.data import to_local
from parallel.offload import HostCopies, Slabs
from runtime.simulation import allocates

PIECE = 1 << 24
"""Number of elements of a parameter that are updated at once.

Both moments of two pieces take 256 MiB on the device in float32. One copy moves one moment of a
piece, 64 MiB, which is large enough for a bus to reach its full rate.
"""
MOMENTS = ("exp_avg", "exp_avg_sq")


class ParameterPiece(NamedTuple):
    """Consecutive elements of this rank's shard of a parameter, each a view ``[n]``.

    The moments are in host memory.
    """

    group: dict[str, Any]
    step: Tensor
    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]


class HostAdamW(torch.optim.AdamW):
    """A fused AdamW with its moments in host memory; its results equal torch's to the bit.

    For a GPU the memory is pinned. A step moves 8 bytes each way for every parameter of this rank,
    and takes as long as the slower direction.
    """

    _copies: HostCopies | None = None
    _slabs: Slabs | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; unlike AdamW's, it takes no closure."""
        trained = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trained.append((group, p))
        if not trained:
            return

        self._slabs = self._slabs or Slabs()
        for _, p in trained:
            if not self.state[p]:
                moments = {name: on_host(p, self._slabs) for name in MOMENTS}
                self.state[p] = {"step": torch.zeros((), device=p.device)} | moments
        torch._foreach_add_([self.state[p]["step"] for _, p in trained], 1)

        pieces = []
        for group, p in trained:
            state = self.state[p]
            tensors = [p, p.grad] + [state[name] for name in MOMENTS]
            views = [to_local(x).view(-1).split(PIECE) for x in tensors]
            for weight, gradient, *piece_moments in zip(*views, strict=True):
                if weight.numel():
                    pieces.append(
                        ParameterPiece(group, state["step"], weight, gradient, tuple(piece_moments))
                    )
        if pieces:
            self._update(pieces)

    def _update(self, pieces: list[ParameterPiece]) -> None:
        device = pieces[0].weight.device
        self._copies = copies = self._copies or HostCopies(device)
        compute = copies.compute

        # Two buffers for each moment: one is filled while the other is updated.
        largest = max(x.nbytes for piece in pieces for x in piece.moments)
        buffers: list[list[Tensor]] = []
        for _ in range(2):
            buffers.append(
                [torch.empty(largest, dtype=torch.uint8, device=device) for _ in MOMENTS]
            )
        # The event after which each pair of buffers may be overwritten.
        free: list[Any] = [compute.record_event(), None]

        def copy_in(number: int) -> tuple[list[Tensor], Any]:
            """Start to copy a piece's moments to the device; return the copies and their event."""
            moments = pieces[number].moments
            on_device = []
            for buffer, x in zip(buffers[number % 2], moments, strict=True):
                on_device.append(buffer[: x.nbytes].view(x.dtype))
            pairs = zip(on_device, moments, strict=True)
            return on_device, copies.back(pairs, after=free[number % 2])

        following = copy_in(0)
        for number, piece in enumerate(pieces):
            moments, arrived = following
            if number + 1 < len(pieces):
                following = copy_in(number + 1)
            compute.wait_event(arrived)
            beta1, beta2 = piece.group["betas"]
            torch._fused_adamw_(  # the kernel of ``torch.optim.AdamW(fused=True)``
                [piece.weight],
                [piece.gradient],
                [moments[0]],
                [moments[1]],
                [],
                [piece.step],
                amsgrad=False,
                lr=piece.group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=piece.group["weight_decay"],
                eps=piece.group["eps"],
                maximize=False,
            )
            free[number % 2] = copies.out(zip(piece.moments, moments, strict=True))

        for event in free[: len(pieces)]:
            compute.wait_event(event)


@allocates(offload.MOMENTS)
def on_host(parameter: Tensor, slabs: Slabs) -> Tensor:
    """Return zeros in host memory, sharded like the parameter; cut from ``slabs`` for a GPU."""
    if parameter.device.type == "cpu":
        return torch.zeros_like(parameter, device="cpu")
    return cut(parameter, slabs)


def cut(parameter: Tensor, slabs: Slabs) -> Tensor:
    """Return zeros like a parameter, in memory cut from ``slabs`` (large host buffers)."""
    moment = torch.empty_like(parameter, device="cpu")
    shard = to_local(moment)
    if shard.numel():
        memory = slabs.empty(shard.nbytes, pinned=parameter.device.type != "cpu")
        shard.set_(memory.untyped_storage(), 0, shard.shape, shard.stride()).zero_()
    return moment
