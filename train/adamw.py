"""AdamW with torch's state and another step: by NVIDIA apex's kernel, or with its moments in host memory.

``apex.optimizers.FusedAdam`` takes parameters by their addresses, which a DTensor has none of, and counts the steps of
a whole group. So its kernel, ``multi_tensor_adam``, is called here over each rank's own shards, and every parameter has
the state that torch's AdamW gives it: checkpoints are the same. The kernel adds the decay to the update before it takes
both off the weight, and corrects the moments in float32: the last bits are not those of torch's kernel. No other module
imports apex.

Moments in host memory come to the device a piece at a time, beside the update of another piece. Two streams carry the
copies, one back to the device and one out of it. The host waits for nothing:

* back waits for the computation before the step, to which the memory that it copies to belonged;
* the computation waits for back before it updates a piece;
* out waits for the computation, which has written what is copied;
* back waits for out before the memory of a piece takes the next but one;
* the computation waits for out after the last pieces: what comes after the step finds all moments in host memory.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from parallel import offload
from parallel.data import to_local
from parallel.offload import HostCopies, Slabs
from runtime.errors import UserError
from runtime.simulation import allocates

Backend = Literal["torch", "apex"]
ADAM_W, BIAS_CORRECTION = 1, 1
"""The kernel's mode of decoupled weight decay, where 0 is L2 regularisation, and moments corrected for their start."""
EMULATED = False
"""If set, the kernel runs on a CPU: that of tests does."""
FIX = (
    "build it where the run is (APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "
    "git+https://github.com/NVIDIA/apex; the index's package of that name is another one), or leave optimizer_backend "
    "out, whose torch does the same work"
)
PIECE = 1 << 24
"""Elements of a parameter that are updated at once: two moments of two pieces take 256 MiB on the device in float32,
and a copy of one is 64 MiB, at which a bus reaches its rate."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def apex_kernel() -> Callable[..., None]:
    """Return the kernel, for (no-op flag, [gradients, weights, moments, squares], settings...).

    Raises:
        UserError: apex is missing, another package, without its CUDA extensions, or built for another torch.
    """
    try:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        return partial(multi_tensor_applier, amp_C.multi_tensor_adam)
    except Exception as error:  # a build for another torch raises ImportError or OSError, another package anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"optimizer_backend is apex, and NVIDIA's apex with its CUDA extensions is not here ({reason}); {FIX}"
        ) from error


class ApexAdamW(torch.optim.AdamW):
    """AdamW with apex's kernel and torch's state, but for the counts of steps, which lie in host memory.

    There they are read without waiting for the device.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._kernel, self._no_op = apex_kernel(), dict[torch.device, Tensor]()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure, which AdamW would call, is not taken."""
        for group in self.param_groups:
            launches = defaultdict[int, list[tuple[Tensor, ...]]](list)  # a launch has one count of steps
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")} | moments
                state = self.state[p]
                state["step"] += 1
                if to_local(p).numel():  # an empty shard, at a list's end, would keep the kernel from its last launch
                    own = (p.grad, p, state["exp_avg"], state["exp_avg_sq"])
                    launches[int(state["step"])].append(tuple(map(to_local, own)))
            for count, tensors in launches.items():
                lists, device = [list(alike) for alike in zip(*tensors, strict=True)], tensors[0][0].device
                if device not in self._no_op:
                    self._no_op[device] = torch.zeros(1, dtype=torch.int, device=device)
                settings = (group["lr"], *group["betas"], group["eps"], count, ADAM_W, BIAS_CORRECTION)
                self._kernel(self._no_op[device], lists, *settings, group["weight_decay"])


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
        trained = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._slabs = slabs = self._slabs or Slabs()
        for _, p in trained:
            if not self.state[p]:
                own = {name: on_host(p, slabs) for name in MOMENTS}
                self.state[p] = {"step": torch.zeros((), device=p.device)} | own
        if trained:
            torch._foreach_add_([self.state[p]["step"] for _, p in trained], 1)
        pieces = []
        for group, p in trained:
            of = p, p.grad, *(self.state[p][name] for name in MOMENTS)
            for weight, gradient, *moments in zip(*(to_local(x).view(-1).split(PIECE) for x in of), strict=True):
                if weight.numel():
                    pieces.append(Piece(group, self.state[p]["step"], weight, gradient, tuple(moments)))
        if pieces:
            self._update(pieces)

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
    """Return zeros like a parameter, sharded as it is, in host memory, beside a GPU in that of ``slabs``."""
    return torch.zeros_like(parameter, device="cpu") if parameter.device.type == "cpu" else cut(parameter, slabs)


def cut(parameter: Tensor, slabs: Slabs) -> Tensor:
    """Return zeros like a parameter in memory of ``slabs``."""
    moment = torch.empty_like(parameter, device="cpu")
    if (own := to_local(moment)).numel():
        memory = slabs.empty(own.nbytes, pinned=parameter.device.type != "cpu")
        own.set_(memory.untyped_storage(), 0, own.shape, own.stride()).zero_()
    return moment
