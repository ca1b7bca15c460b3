"""Naive implementations of all kernels, for small exact runs."""

import torch

from kernels import reference
from kernels.backends.base import AttentionKernel
from kernels.backends.chunked import Chunked


class Reference(Chunked):
    """Softmax attention over all pairs, and linear attention over all pairs or token by token.

    Linear attention is naive only if a process has whole sequences. With context parallelism, the
    states that ranks pass on are computed chunk by chunk.
    """

    name = "reference"
    softmax = True

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, fallback: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the naive kernel of one block."""
        return AttentionKernel(self.name, reference.block_forward, reference.block_backward)
