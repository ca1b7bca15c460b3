"""Pinned host memory for tensors that stay."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

SLAB, ALIGNED = 1 << 30, 512
"""Bytes of a slab, once there are as many, and what a tensor's place in it is a multiple of."""


def pinned_bytes(count: int) -> int:
    """Return what torch pins for so many bytes: the next power of two (``CachingHostAllocator.h``)."""
    return 1 << (count - 1).bit_length() if count else 0


class Slabs:
    """Memory cut from slabs of a power of two bytes: torch pins no other, so that 1.1 GiB alone would take 2.

    A slab is as large as all before it, up to 1 GiB or, of larger tensors, ``several``.
    """

    def __init__(self, several: int = 1) -> None:
        self._several = several
        self.sizes: list[int] = []
        self._left: list[int] = []
        self._memory: dict[int, Tensor] = {}

    def place(self, count: int) -> tuple[int, int]:
        """Return which slab has room for so many bytes, a new one if need be, and where they begin in it."""
        need = -(-count // ALIGNED) * ALIGNED
        number = next((number for number, left in enumerate(self._left) if left >= need), len(self._left))
        if number == len(self._left):
            as_many = 1 << sum(self.sizes).bit_length() >> 1
            most = max(SLAB, self._several * pinned_bytes(need))
            self.sizes.append(max(pinned_bytes(need), min(most, as_many)))
            self._left.append(self.sizes[-1])
        self._left[number] -= need
        return number, self.sizes[number] - self._left[number] - need

    def empty(self, count: int, pinned: bool) -> Tensor:
        """Return memory, uint8 ``[count]``, whose storage is no larger: DCP copies what is a view before it writes."""
        number, start = self.place(count)
        if number not in self._memory:
            if pinned and not self._memory:  # torch cannot see a copy of what numpy cut when it frees the slab
                weakref.finalize(self, torch.cuda.synchronize).atexit = False
            self._memory[number] = torch.empty(self.sizes[number], dtype=torch.uint8, pin_memory=pinned)
        return torch.from_numpy(self._memory[number][start : start + count].numpy())


def in_slabs(counts: Iterable[int], several: int = 1) -> int:
    """Return the bytes of the slabs of tensors of so many bytes each, in this order."""
    slabs = Slabs(several)
    for count in counts:
        slabs.place(count)
    return sum(slabs.sizes)
