"""Linear attention and the delta rule in torch, chunk by chunk, on any device."""

from kernels.backends.base import Backend, Scan, SlabKernel
from kernels.delta import chunks
from kernels.linear_scan import scan


class Chunked(Backend):
    """Matrix products of torch; memory and time are linear in the number of tokens."""

    name = "chunked"
    linear = True

    def linear_scan(self) -> Scan:
        """Return the scan in torch."""
        return scan

    def delta_slab(self) -> SlabKernel:
        """Return the slab in torch."""
        return chunks.forward, chunks.backward
