"""Linear attention and the delta rule in torch, chunk by chunk, on any device."""

from kernels.backends.base import Backend, Scan, Slab
from kernels.delta import chunks
from kernels.linear_scan import scan


class Chunked(Backend):
    """Products of torch, with memory and time linear in the number of tokens."""

    name = "chunked"
    linear = True

    def linear_scan(self) -> Scan:
        """Return the scan in torch."""
        return scan

    def delta_slab(self) -> Slab:
        """Return the slab in torch."""
        return chunks.forward, chunks.backward
