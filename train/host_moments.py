"""AdamW whose moments lie in host memory and come to the device a piece at a time, beside the update of another piece.

Two streams carry the copies, one back to the device and one out of it. The host waits for nothing:

* back waits for the computation before the step, to which the memory that it copies to belonged;
* the computation waits for back before it updates a piece;
* out waits for the computation, which has written what is copied;
* back waits for out before the memory of a piece takes the next but one;
* the computation waits for out after the last pieces: what comes after the step finds all moments in host memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.data import to_local
from parallel.offload import HostCopies, Slabs

PIECE = 1 << 24
"""Elements of a parameter that are updated at once: two moments of two pieces take 256 MiB on the device in float32,
and a copy of one is 64 MiB, at which a bus reaches its rate."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """Consecutive elements of this rank's part of a parameter, each a view ``[n]``; moments in host memory."""

    group: dict[str, Any]
    step: Tensor
    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]


class HostAdamW(torch.optim.AdamW):
    """A fused AdamW with its moments in host memory, pinned beside a GPU; the same numbers as without, to the bit.

    A step moves 8 bytes each way for every parameter of this rank, and takes as long as the slower way.
    """

    _copies: HostCopies | None = None
    _slabs: Slabs | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure, which AdamW would call, is not taken."""
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._slabs = slabs = self._slabs or Slabs()
        for p in trained:
            if not self.state[p]:
                own = {name: on_host(p, slabs) for name in MOMENTS}
                self.state[p] = {"step": torch.zeros((), device=p.device)} | own
        if trained:
            torch._foreach_add_([self.state[p]["step"] for p in trained], 1)
        if pieces := list(self._pieces()):
            self._update(pieces)

    def _pieces(self) -> Iterator[Piece]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                of = p, p.grad, *(self.state[p][name] for name in MOMENTS)
                for weight, gradient, *moments in zip(*(to_local(x).view(-1).split(PIECE) for x in of), strict=True):
                    if weight.numel():
                        yield Piece(group, self.state[p]["step"], weight, gradient, tuple(moments))

    def _update(self, pieces: list[Piece]) -> None:
        device = pieces[0].weight.device
        self._copies = copies = self._copies or HostCopies(device)
        compute = copies.compute
        most = max(x.nbytes for piece in pieces for x in piece.moments)
        rooms = [[torch.empty(most, dtype=torch.uint8, device=device) for _ in MOMENTS] for _ in range(2)]
        left: list[Any] = [compute.record_event(), None]  # behind which a room is free

        def bring(number: int) -> tuple[list[Tensor], Any]:
            moments = pieces[number].moments
            taken = [room[: x.nbytes].view(x.dtype) for room, x in zip(rooms[number % 2], moments, strict=True)]
            return taken, copies.back(zip(taken, moments, strict=True), after=left[number % 2])

        following = bring(0)
        for number, piece in enumerate(pieces):
            taken, arrived = following
            if number + 1 < len(pieces):
                following = bring(number + 1)
            compute.wait_event(arrived)
            _adamw(piece, taken)
            left[number % 2] = copies.out(zip(piece.moments, taken, strict=True))
        for event in left[: len(pieces)]:
            compute.wait_event(event)


def _adamw(piece: Piece, moments: list[Tensor]) -> None:
    """Update a piece by the kernel of ``torch.optim.AdamW(fused=True)``."""
    group, (first, second) = piece.group, piece.group["betas"]
    torch._fused_adamw_(
        [piece.weight],
        [piece.gradient],
        [moments[0]],
        [moments[1]],
        [],
        [piece.step],
        amsgrad=False,
        lr=group["lr"],
        beta1=first,
        beta2=second,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def on_host(parameter: Tensor, slabs: Slabs) -> Tensor:
    """Return zeros like a parameter, sharded as it is, in host memory, beside a GPU in that of ``slabs``."""
    return torch.zeros_like(parameter, device="cpu") if parameter.device.type == "cpu" else cut(parameter, slabs)


def cut(parameter: Tensor, slabs: Slabs) -> Tensor:
    """Return zeros like a parameter in memory of ``slabs``."""
    moment = torch.empty_like(parameter, device="cpu")
    if (own := to_local(moment)).numel():
        memory = slabs.empty(own.nbytes, pinned=parameter.device.type != "cpu")
        own.set_(memory.untyped_storage(), 0, own.shape, own.stride()).zero_()
    return moment
