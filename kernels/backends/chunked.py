"""Linear attention and the delta rule in torch, computed in chunks of tokens, on any device."""

from kernels.backends.base import Backend, Scan, SlabKernel
from kernels.delta import chunks
from kernels.linear_scan import scan


class Chunked(Backend):
    """Linear attention by matmuls in torch; memory and time are linear in the number of tokens."""

    name = "chunked"
    linear = True

    def linear_scan(self) -> Scan:
        """Return the scan implemented in torch."""
        return scan

    def delta_slab(self) -> SlabKernel:
        """Return the slab functions implemented in torch."""
        return chunks.forward, chunks.backward
