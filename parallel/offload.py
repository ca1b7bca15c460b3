"""Activations in host memory between forward and backward, copied beside the computation.

Two streams carry the copies, one out and one back. The host waits for nothing; streams wait for
events of each other:

* out waits for the computation, which has written what is copied;
* the computation waits for out before the memory that was copied from is free for others;
* back waits for the computation, to which the memory that it copies to belonged, and which has
waited for out;
* the computation waits for back before it reads.

So the computation stands between any two copies: what is let go behind its wait, on the device or
in host memory, no copy touches any more. ``Tensor.record_stream`` would not do: what it marks is
free once the *host* sees the copy done, and the host, which queues a forward far ahead of the
device, would take new memory for every layer.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, get_device_module

from runtime.simulation import allocates

KEPT, MOMENTS = "kept on the host", "moments on the host"
"""Causes of host memory, for a rehearsal."""
SLAB, ALIGNED = 1 << 30, 512
"""Bytes of a slab, once there are as many, and what a tensor's place in it is a multiple of."""


def pinned_bytes(count: int) -> int:
    """Return what torch pins for so many bytes: the next power of two (``CachingHostAllocator.h``)."""
    return 1 << (count - 1).bit_length() if count else 0


class Slabs:
    """Memory cut from slabs of a power of two bytes: torch pins no other, so that 1.1 GiB alone
    would take 2.

    A slab is as large as all before it, up to 1 GiB or, of larger tensors, ``several``.
    """

    def __init__(self, several: int = 1) -> None:
        self._several = several
        self.sizes: list[int] = []
        self._left: list[int] = []
        self._memory: dict[int, Tensor] = {}

    def place(self, count: int) -> tuple[int, int]:
        """Return which slab has room for so many bytes, a new one if need be, and where they begin
        in it.
        """
        need = -(-count // ALIGNED) * ALIGNED
        number = next(
            (number for number, left in enumerate(self._left) if left >= need), len(self._left)
        )
        if number == len(self._left):
            as_many = 1 << sum(self.sizes).bit_length() >> 1
            most = max(SLAB, self._several * pinned_bytes(need))
            self.sizes.append(max(pinned_bytes(need), min(most, as_many)))
            self._left.append(self.sizes[-1])
        self._left[number] -= need
        return number, self.sizes[number] - self._left[number] - need

    def empty(self, count: int, pinned: bool) -> Tensor:
        """Return memory, uint8 ``[count]``, whose storage is no larger: DCP copies what is a view
        before it writes.
        """
        number, start = self.place(count)
        if number not in self._memory:
            if (
                pinned and not self._memory
            ):  # torch cannot see a copy of what numpy cut when it frees the slab
                weakref.finalize(self, torch.cuda.synchronize).atexit = False
            self._memory[number] = torch.empty(
                self.sizes[number], dtype=torch.uint8, pin_memory=pinned
            )
        return torch.from_numpy(self._memory[number][start : start + count].numpy())


def in_slabs(counts: Iterable[int], several: int = 1) -> int:
    """Return the bytes of the slabs of tensors of so many bytes each, in this order."""
    slabs = Slabs(several)
    for count in counts:
        slabs.place(count)
    return sum(slabs.sizes)


Pairs = Iterable[tuple[Tensor, Tensor]]
"""Tensors to copy to, each with the one to copy from."""


class HostCopies:
    """Two streams beside the computation that carry copies out to host memory and back; on a CPU
    they do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._here = device, get_device_module(device)
        self._out, self._back = self._here.Stream(device), self._here.Stream(device)

    @property
    def compute(self) -> Any:
        """Return the stream of the computation."""
        return self._here.current_stream(self._device)

    def out(self, pairs: Pairs) -> Any:
        """Begin copies to host memory of what the computation has written; return the event behind
        them.
        """
        self._out.wait_event(self.compute.record_event())
        return self._copied(self._out, pairs)

    def back(self, pairs: Pairs, after: Any = None) -> Any:
        """Begin copies to the device, behind the event ``after`` if one is given; return the event
        behind them.
        """
        if after is not None:
            self._back.wait_event(after)
        return self._copied(self._back, pairs)

    def _copied(self, stream: Any, pairs: Pairs) -> Any:
        with self._here.stream(stream):
            for to, x in pairs:
                to.copy_(x, non_blocking=True)
            return stream.record_event()


ON_DEVICE = 2
"""Layers whose kept tensors are on the device: in the forward the one that runs, and the one
before, whose copies may still be under way; in the backward the one that runs, and the one that is
next, whose tensors are on their way."""
FETCH_AHEAD = 1 << 30
"""Bytes of a layer up to which they are on their way while the layer after it runs. A layer that
keeps more has so many tokens that reading them takes little beside its attention, and memory is
what is scarce."""

SEVERAL = 4
"""Tensors above 1 GiB that a slab of host memory has room for: of one alone, nearly half may be
left.
"""


class Offload:
    """Host memory, streams and order of the layers of a model, or of a pipeline stage's part of
    one.
    """

    def __init__(self) -> None:
        self.idle: defaultdict[int, list[Tensor]] = defaultdict(list)
        """Pinned buffers of each size in bytes: pinning memory stops the device, so none is given
        back.
        """
        self._slabs = Slabs(SEVERAL)
        self._recent: deque[Layer] = deque()
        self._copies: HostCopies | None = None

    def layer(self, first: bool) -> "Layer":
        """Begin the forward of the next layer, or of the ``first``; its copies have the time of a
        layer to end.
        """
        before = None if first or not self._recent else self._recent[-1]
        while len(self._recent) >= ON_DEVICE:
            self._recent.popleft().release()
        self._recent.append(Layer(self, before))
        return self._recent[-1]

    def copies(self, device: torch.device) -> HostCopies:
        """Return the streams of all layers' copies."""
        self._copies = self._copies or HostCopies(device)
        return self._copies

    @allocates(KEPT)
    def buffer(self, count: int, device: torch.device) -> Tensor:
        """Return so many bytes of host memory, which no copy touches once the computation gets
        here.
        """
        if idle := self.idle[count]:
            return idle.pop()
        on_cpu = device.type == "cpu"
        return (
            torch.empty(count, dtype=torch.uint8)
            if on_cpu
            else self._slabs.empty(count, pinned=True)
        )


class Layer:
    """Tensors that one layer keeps in one forward."""

    def __init__(self, offload: Offload, before: "Layer | None") -> None:
        self._offload, self._before = offload, before
        self._kept: list[ref[OnHost]] = []  # autograd holds them, and with them this
        self._bytes = 0

    @torch.no_grad()
    def pack(self, x: Tensor) -> "OnHost | Tensor":
        """Begin the copy of ``x`` to host memory, dense, in its order of dimensions; a single
        number stays.

        Of such there is nothing to gain, and the seeds that torch's memory-efficient attention
        returns are on the host.
        """
        if x.ndim == 0 or not x.numel():
            return x
        own, whole = _own_part(x)
        copies, like = self._offload.copies(own.device), torch.empty_like(own, device="meta")
        buffer = self._offload.buffer(like.nbytes, own.device)
        host = buffer.view(like.dtype).as_strided(like.shape, like.stride())
        stored = copies.out([(host, own)])
        kept = OnHost(
            self,
            self._offload,
            own.device,
            copies.compute,
            buffer,
            host,
            whole,
            source=x,
            stored=stored,
        )
        self._kept.append(ref(kept))
        self._bytes += buffer.numel()
        return kept

    def fetch(self) -> None:
        """Begin the copies back to the device of what was not asked for yet."""
        for kept in (one() for one in self._kept):
            if kept is not None and not kept.asked:
                kept.fetch()

    def fetch_with_next(self) -> None:
        """As ``fetch``, and those of the layer before, whose backward is next, up to
        ``FETCH_AHEAD`` bytes.

        More than that leaves the device for the time of this layer's backward, if it is the last
        layer's.
        """
        self.fetch()
        if self._before is not None and self._before._bytes <= FETCH_AHEAD:
            self._before.fetch()
        elif self._before is not None:
            self._before.release()

    def release(self) -> None:
        """Let go of the layer's tensors on the device."""
        for kept in (one() for one in self._kept):
            if kept is not None:
                kept.release()


def take(kept: "OnHost | Tensor") -> Tensor:
    """Return a tensor that ``Layer.pack`` was given; begin the copies of those that its backward
    needs next.
    """
    if isinstance(kept, Tensor):
        return kept
    kept.layer.fetch_with_next()
    return kept.take()


@dataclass(eq=False)
class OnHost:
    """A tensor in host memory; at first, and again before it is read, on the device too."""

    layer: Layer
    offload: Offload
    device: torch.device
    compute: Any
    """The stream of the computation."""
    buffer: Tensor
    host: Tensor
    """The buffer with the dtype, sizes and strides of what it holds."""
    whole: Callable[[Tensor], Tensor]
    """Makes the tensor that was given of this rank's part."""
    source: Tensor | None
    """The tensor given, until the computation has waited for its copy."""
    stored: Any
    """The event behind its copy to the host."""
    coming: tuple[Tensor, Any] | None = None
    """The copy on the device, and the event behind it."""
    asked: bool = False

    def release(self) -> None:
        """Let go of what was given."""
        if self.source is not None:
            self.compute.wait_event(self.stored)
            self.source = None

    @torch.no_grad()
    def fetch(self) -> None:
        """Begin the copy back to the device, unless it is there or on its way."""
        if self.source is not None or self.coming is not None:
            return
        # Memory of the computation's stream, to which it returns: behind its wait for the copy.
        there = torch.empty_strided(
            self.host.shape, self.host.stride(), dtype=self.host.dtype, device=self.device
        )
        copied = self.offload.copies(self.device).back(
            [(there, self.host)], after=self.compute.record_event()
        )
        self.coming = there, copied

    @torch.no_grad()
    def take(self) -> Tensor:
        """Return the tensor, which the computation may read from here on."""
        self.asked = True
        if self.source is not None:  # one of the last layers, whose backward comes first
            source = self.source
            self.release()
            return source
        self.fetch()
        return self.whole(self._arrived())

    def _arrived(self) -> Tensor:
        assert self.coming is not None
        (there, copied), self.coming = self.coming, None
        self.compute.wait_event(copied)
        return there

    def __del__(self) -> None:
        """Give the buffer to the next tensor of its size; also where no backward came, as behind an
        error.
        """
        self.release()
        if self.coming is not None:
            self._arrived()
        self.offload.idle[self.buffer.numel()].append(self.buffer)


def _own_part(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return this rank's part of ``x``, and what makes the like of ``x`` of such a part."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    whole: Callable[[Tensor], Tensor] = identity
    if isinstance(x, DTensor):
        placed: dict[str, Any] = {
            "placements": x.placements,
            "shape": x.shape,
            "stride": x.stride(),
        }
        whole = partial(DTensor.from_local, device_mesh=x.device_mesh, run_check=False, **placed)
        x = x.to_local()
    # The computation waits for what is still on its way, not the stream of the copies in its place.
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x, whole


def identity(x: Any) -> Any:
    """Return ``x``."""
    return x
