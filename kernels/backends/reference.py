"""The naive twins of all kernels, for small exact runs."""

import torch

from kernels import reference
from kernels.backends.base import AttentionKernel
from kernels.backends.chunked import Chunked


class Reference(Chunked):
    """Every pair, or token by token.

    Linear attention is so if a process has whole sequences; what ranks pass on goes by chunks.
    """

    name = "reference"
    softmax = True

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, other: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the naive block."""
        return AttentionKernel(self.name, reference.block_forward, reference.block_backward)
