"""Keep activations in host memory between the forward and the backward pass.

Two streams copy while the computation runs: ``out`` to the host, and ``back`` to the device. The
host waits for nothing; streams wait for events of each other:

* ``out`` waits for the computation, which has written the memory to copy;
* the computation waits for ``out`` before that memory is free for other tensors;
* ``back`` waits for the computation, which last used the memory to copy into, and which has waited
  for ``out``;
* the computation waits for ``back`` before it reads.

So the computation always waits between two copies that touch the same memory, on the device or on
the host. ``Tensor.record_stream`` would not do: memory that it marks becomes free only once the
*host* sees that the copy is done. Since the host queues a forward pass far ahead of the device, it
would allocate new memory for every layer.
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

KEPT = "kept on the host"
"""Label under which a rehearsal (a simulated step) counts host memory for activations."""
MOMENTS = "moments on the host"
"""Label under which a rehearsal counts host memory for the optimizer's moments."""
SLAB = 1 << 30
"""Maximum size in bytes of a slab (a host buffer for many tensors), unless a tensor needs more."""
ALIGNED = 512
"""Alignment in bytes of the tensors in a slab."""


def pinned_bytes(count: int) -> int:
    """Return the number of bytes that torch pins for ``count`` bytes: the next power of two.

    Source: torch's ``CachingHostAllocator.h``.
    """
    return 1 << (count - 1).bit_length() if count else 0


class Slabs:
    """Host memory for many tensors, cut from slabs (large buffers of a power of two bytes).

    torch pins only powers of two, so a tensor of 1.1 GiB by itself would take 2 GiB. A new slab is
    about as large as all earlier ones together, up to 1 GiB or, for large tensors, up to the size
    of ``several`` such tensors.
    """

    def __init__(self, several: int = 1) -> None:
        self._several = several
        self.sizes: list[int] = []
        self._free: list[int] = []
        self._memory: dict[int, Tensor] = {}

    def place(self, count: int) -> tuple[int, int]:
        """Reserve ``count`` bytes; return the index of their slab, and their offset in it."""
        aligned_count = -(-count // ALIGNED) * ALIGNED
        number = 0
        while number < len(self._free) and self._free[number] < aligned_count:
            number += 1
        if number == len(self._free):
            earlier_bytes = 1 << sum(self.sizes).bit_length() >> 1  # power of two up to their sum
            max_size = max(SLAB, self._several * pinned_bytes(aligned_count))
            self.sizes.append(max(pinned_bytes(aligned_count), min(max_size, earlier_bytes)))
            self._free.append(self.sizes[-1])
        self._free[number] -= aligned_count
        return number, self.sizes[number] - self._free[number] - aligned_count

    def empty(self, count: int, pinned: bool) -> Tensor:
        """Return host memory, uint8 ``[count]``.

        Its storage has exactly this size, because torch's distributed checkpoint copies a view of
        a larger storage before writing it.
        """
        number, start = self.place(count)
        if number not in self._memory:
            if pinned and not self._memory:
                # Before the slabs are freed, wait for all copies: torch does not know that copies
                # still use the arrays that numpy cut from a slab.
                weakref.finalize(self, torch.cuda.synchronize).atexit = False
            self._memory[number] = torch.empty(
                self.sizes[number], dtype=torch.uint8, pin_memory=pinned
            )
        return torch.from_numpy(self._memory[number][start : start + count].numpy())


def in_slabs(counts: Iterable[int], several: int = 1) -> int:
    """Return the bytes of all slabs that tensors of these sizes need, if placed in this order."""
    slabs = Slabs(several)
    for count in counts:
        slabs.place(count)
    return sum(slabs.sizes)


Pairs = Iterable[tuple[Tensor, Tensor]]
"""Pairs (target, source) of tensors to copy."""


class HostCopies:
    """Two streams that copy to host memory and back while the computation runs.

    On a CPU the streams do nothing, and copies are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._device_module = get_device_module(device)
        self._out = self._device_module.Stream(device)
        self._back = self._device_module.Stream(device)

    @property
    def compute(self) -> Any:
        """Stream of the computation: the device's current stream."""
        return self._device_module.current_stream(self._device)

    def out(self, pairs: Pairs) -> Any:
        """Begin copies to the host, after the computation so far; return an event at their end."""
        self._out.wait_event(self.compute.record_event())
        return self._copied(self._out, pairs)

    def back(self, pairs: Pairs, after: Any = None) -> Any:
        """Begin copies to the device, after an event if given; return an event at their end."""
        if after is not None:
            self._back.wait_event(after)
        return self._copied(self._back, pairs)

    def _copied(self, stream: Any, pairs: Pairs) -> Any:
        with self._device_module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()


ON_DEVICE = 2
"""Number of layers whose saved tensors are on the device. In the forward pass, these are the layer
that runs and the one before it, whose copies may still be under way. In the backward pass, they are
the layer that runs and the next one, whose tensors are being fetched."""
FETCH_AHEAD = 1 << 30
"""Maximum number of bytes of a layer's saved tensors that are fetched ahead, while the backward
pass is still in the layer after it. A larger layer is fetched only when its own backward pass
begins, because it has so many tokens that memory is scarce, and that fetching takes little time
compared with its attention."""

SEVERAL = 4
"""Number of tensors above 1 GiB that fit into one slab of host memory: with one tensor per slab,
nearly half of the slab may be unused.
"""


class Offload:
    """Moves the tensors that a model's layers (or a pipeline stage's) save to host memory.

    It owns the host memory and the copy streams, and knows the order of the layers.
    """

    def __init__(self) -> None:
        self.idle: defaultdict[int, list[Tensor]] = defaultdict(list)
        """Host buffers that no copy uses, keyed by size in bytes. They are reused and never freed,
        since pinning new memory stops the device.
        """
        self._slabs = Slabs(SEVERAL)
        self._recent: deque[Layer] = deque()
        self._copies: HostCopies | None = None

    def layer(self, first: bool) -> "Layer":
        """Begin the forward pass of the next layer, or of the first one if ``first``.

        A layer's copies may take until the end of the next layer's forward pass; then the
        computation waits for them.
        """
        previous = None if first or not self._recent else self._recent[-1]
        while len(self._recent) >= ON_DEVICE:
            self._recent.popleft().release()
        self._recent.append(Layer(self, previous))
        return self._recent[-1]

    def copies(self, device: torch.device) -> HostCopies:
        """Return the copy streams, which all layers share."""
        if self._copies is None:
            self._copies = HostCopies(device)
        return self._copies

    @allocates(KEPT)
    def buffer(self, count: int, device: torch.device) -> Tensor:
        """Return ``count`` bytes of host memory that no earlier copy uses any more."""
        if self.idle[count]:
            return self.idle[count].pop()
        if device.type == "cpu":
            return torch.empty(count, dtype=torch.uint8)
        return self._slabs.empty(count, pinned=True)


class Layer:
    """Tensors that one layer saves in one forward pass."""

    def __init__(self, offload: Offload, previous: "Layer | None") -> None:
        self._offload = offload
        self._previous = previous
        self._saved: list[ref[OnHost]] = []  # weak: autograd owns them, and they refer to the layer
        self._bytes = 0

    @torch.no_grad()
    def pack(self, x: Tensor) -> "OnHost | Tensor":
        """Begin copying ``x`` to dense host memory; return what ``unpack`` needs to restore it.

        The copy has the dimensions in the same order as ``x``. A single number is returned as it
        is: moving it would save no memory, and the seeds that torch's memory-efficient attention
        returns are already on the host.
        """
        if x.ndim == 0 or not x.numel():
            return x
        local, rebuild = _local_part(x)
        copies = self._offload.copies(local.device)
        meta = torch.empty_like(local, device="meta")
        buffer = self._offload.buffer(meta.nbytes, local.device)
        host = buffer.view(meta.dtype).as_strided(meta.shape, meta.stride())
        stored = copies.out([(host, local)])
        saved = OnHost(
            self,
            self._offload,
            local.device,
            copies.compute,
            buffer,
            host,
            rebuild,
            source=x,
            stored=stored,
        )
        self._saved.append(ref(saved))
        self._bytes += buffer.numel()
        return saved

    def fetch(self) -> None:
        """Begin copying all tensors that are not unpacked yet back to the device."""
        for reference in self._saved:
            saved = reference()
            if saved is not None and not saved.unpacked:
                saved.fetch()

    def fetch_with_previous(self) -> None:
        """Fetch the tensors of this layer, and of the previous one, whose backward pass is next.

        If the previous layer has more than ``FETCH_AHEAD`` bytes, it is not fetched yet; its device
        memory is released instead, so that this layer's backward pass can use it.
        """
        self.fetch()
        if self._previous is None:
            return
        if self._previous._bytes <= FETCH_AHEAD:
            self._previous.fetch()
        else:
            self._previous.release()

    def release(self) -> None:
        """Release the device memory of the layer's tensors."""
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.release()


def unpack(saved: "OnHost | Tensor") -> Tensor:
    """Return a tensor that ``Layer.pack`` saved; begin the copies that are needed next."""
    if isinstance(saved, Tensor):
        return saved
    saved.layer.fetch_with_previous()
    return saved.unpack()


@dataclass(eq=False)
class OnHost:
    """A tensor in host memory; also on the device until its copy ends, and while it is read."""

    layer: Layer
    offload: Offload
    device: torch.device
    compute: Any
    """Stream of the computation."""
    buffer: Tensor
    host: Tensor
    """The copy in host memory: ``buffer``, viewed with the tensor's dtype, sizes and strides."""
    rebuild: Callable[[Tensor], Tensor]
    """Function that rebuilds the original tensor, such as a DTensor, from this rank's part."""
    source: Tensor | None
    """The original tensor; None once the computation has waited for the copy to the host."""
    stored: Any
    """Event at the end of the copy to the host."""
    fetching: tuple[Tensor, Any] | None = None
    """While the tensor is fetched: its copy on the device, and the event at the end of that copy.
    """
    unpacked: bool = False

    def release(self) -> None:
        """Release the original tensor, after the computation has waited for its copy."""
        if self.source is not None:
            self.compute.wait_event(self.stored)
            self.source = None

    @torch.no_grad()
    def fetch(self) -> None:
        """Begin the copy back to the device, unless the tensor is there or on its way."""
        if self.source is not None or self.fetching is not None:
            return
        # Allocate in the computation's stream, so that the memory is also freed there, after that
        # stream has waited for the copy.
        target = torch.empty_strided(
            self.host.shape, self.host.stride(), dtype=self.host.dtype, device=self.device
        )
        copies = self.offload.copies(self.device)
        copied = copies.back([(target, self.host)], after=self.compute.record_event())
        self.fetching = (target, copied)

    @torch.no_grad()
    def unpack(self) -> Tensor:
        """Return the tensor, for later operations of the computation's stream."""
        self.unpacked = True
        if self.source is not None:
            # Not released yet: when the backward pass begins, the last layers' tensors are still on
            # the device.
            source = self.source
            self.release()
            return source
        self.fetch()
        return self.rebuild(self._fetched())

    def _fetched(self) -> Tensor:
        assert self.fetching is not None
        target, copied = self.fetching
        self.fetching = None
        self.compute.wait_event(copied)
        return target

    def __del__(self) -> None:
        """Release the buffer for reuse, even if no backward pass ran (after an error)."""
        self.release()
        if self.fetching is not None:
            self._fetched()
        self.offload.idle[self.buffer.numel()].append(self.buffer)


def _local_part(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return this rank's part of ``x``, and a function that rebuilds a tensor like ``x``."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    rebuild: Callable[[Tensor], Tensor] = identity
    if isinstance(x, DTensor):
        layout: dict[str, Any] = {
            "placements": x.placements,
            "shape": x.shape,
            "stride": x.stride(),
        }
        rebuild = partial(DTensor.from_local, device_mesh=x.device_mesh, run_check=False, **layout)
        x = x.to_local()
    if isinstance(x, AsyncCollectiveTensor):
        # Let the computation wait for the collective; otherwise the stream of copies would wait.
        x = x.trigger_wait()
    return x, rebuild


def identity(x: Any) -> Any:
    """Return ``x`` unchanged."""
    return x
