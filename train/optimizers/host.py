"""AdamW with its moments in host memory.

They come to the device a piece at a time, beside the update of another piece. Two streams carry the
copies, one back to the device and one out of it. The host waits for nothing:

* back waits for the computation before the step, to which the memory that it copies to belonged;
* the computation waits for back before it updates a piece;
* out waits for the computation, which has written what is copied;
* back waits for out before the memory of a piece takes the next but one;
* the computation waits for out after the last pieces: what comes after the step finds all moments
  in host memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel import offload
from parallel.data import to_local
from parallel.offload import HostCopies, Slabs
from runtime.simulation import allocates

PIECE = 1 << 24
"""Elements of a parameter that are updated at once.

Two moments of two pieces take 256 MiB on the device in float32, and a copy of one is 64 MiB, at
which a bus reaches its rate.
"""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """Consecutive elements of this rank's part of a parameter, each a view ``[n]``.

    Its moments lie in host memory.
    """

    group: dict[str, Any]
    step: Tensor
    weight: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]


class HostAdamW(torch.optim.AdamW):
    """A fused AdamW with its moments in host memory, pinned beside a GPU; torch's to the bit.

    A step moves 8 bytes each way for every parameter of this rank, and takes as long as the slower
    way.
    """

    _copies: HostCopies | None = None
    _slabs: Slabs | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; unlike AdamW's, it takes no closure."""
        named = [(group, p) for group in self.param_groups for p in group["params"]]
        trained = [(group, p) for group, p in named if p.grad is not None]
        self._slabs = slabs = self._slabs or Slabs()
        for _, p in trained:
            if not self.state[p]:
                moments = {name: on_host(p, slabs) for name in MOMENTS}
                self.state[p] = {"step": torch.zeros((), device=p.device)} | moments
        if trained:
            torch._foreach_add_([self.state[p]["step"] for _, p in trained], 1)
        pieces = []
        for group, p in trained:
            state = self.state[p]
            tensors = p, p.grad, *(state[name] for name in MOMENTS)
            split = (to_local(x).view(-1).split(PIECE) for x in tensors)
            for weight, gradient, *parts in zip(*split, strict=True):
                if weight.numel():
                    pieces.append(Piece(group, state["step"], weight, gradient, tuple(parts)))
        if pieces:
            self._update(pieces)

    def _update(self, pieces: list[Piece]) -> None:
        device = pieces[0].weight.device
        self._copies = copies = self._copies or HostCopies(device)
        compute = copies.compute
        largest = max(x.nbytes for piece in pieces for x in piece.moments)
        buffers = [
            [torch.empty(largest, dtype=torch.uint8, device=device) for _ in MOMENTS],
            [torch.empty(largest, dtype=torch.uint8, device=device) for _ in MOMENTS],
        ]
        left: list[Any] = [compute.record_event(), None]  # behind which a buffer is free

        def bring(number: int) -> tuple[list[Tensor], Any]:
            moments = pieces[number].moments
            pairs = zip(buffers[number % 2], moments, strict=True)
            taken = [buffer[: x.nbytes].view(x.dtype) for buffer, x in pairs]
            return taken, copies.back(zip(taken, moments, strict=True), after=left[number % 2])

        following = bring(0)
        for number, piece in enumerate(pieces):
            taken, arrived = following
            if number + 1 < len(pieces):
                following = bring(number + 1)
            compute.wait_event(arrived)
            (first, second), group = piece.group["betas"], piece.group
            torch._fused_adamw_(  # the kernel of ``torch.optim.AdamW(fused=True)``
                [piece.weight],
                [piece.gradient],
                [taken[0]],
                [taken[1]],
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
            left[number % 2] = copies.out(zip(piece.moments, taken, strict=True))
        for event in left[: len(pieces)]:
            compute.wait_event(event)


@allocates(offload.MOMENTS)
def on_host(parameter: Tensor, slabs: Slabs) -> Tensor:
    """Return zeros in host memory, sharded as the parameter; beside a GPU in ``slabs``."""
    if parameter.device.type == "cpu":
        return torch.zeros_like(parameter, device="cpu")
    return cut(parameter, slabs)


def cut(parameter: Tensor, slabs: Slabs) -> Tensor:
    """Return zeros like a parameter in memory of ``slabs``."""
    moment = torch.empty_like(parameter, device="cpu")
    shard = to_local(moment)
    if shard.numel():
        memory = slabs.empty(shard.nbytes, pinned=parameter.device.type != "cpu")
        shard.set_(memory.untyped_storage(), 0, shard.shape, shard.stride()).zero_()
    return moment
