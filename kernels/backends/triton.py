"""Longmesh's Triton kernels for softmax attention, linear attention and the delta rule on a GPU."""

import torch

from kernels.backends.base import HALVES, AttentionKernel, Backend, Scan, SlabKernel
from kernels.triton import has_triton, interpreted

MAX_KEY_DIM = 256
"""Maximum number of key channels that the delta rule's kernels support."""


class Triton(Backend):
    """Kernels that compute lists of tiles in one launch, and fused scans.

    On a GPU, ``auto`` uses the scans only for 16-bit inputs: in float32 torch's matmuls are faster,
    since the kernels' state spills from registers, and TF32 is slow.
    """

    name = "triton"
    softmax = True
    linear = True
    dtypes = (torch.float32, *HALVES)

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Return why the kernels cannot run here or with this dtype; None if they can."""
        if not has_triton():
            return "attention_backend is triton, but Triton is not installed; use auto"
        if device_type == "cpu" and not interpreted():
            return "attention_backend triton needs a cuda device, but this one is cpu; use auto"
        if dtype not in self.dtypes:
            return f"attention_backend triton does not support {dtype}; use auto or reference"
        return None

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, fallback: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the kernel that computes all tiles in one launch."""
        from kernels.triton import flash_attention

        return AttentionKernel(self.name, tiled=flash_attention)

    def is_automatic_linear(self, device_type: str, dtype: torch.dtype) -> bool:
        """Return True for a GPU with Triton and a 16-bit dtype."""
        return device_type == "cuda" and dtype in HALVES and has_triton()

    def linear_scan(self) -> Scan:
        """Return the fused scan of linear attention."""
        from kernels.triton import linear_attention

        return linear_attention.scan

    def delta_refusal(self, *, per_channel: bool, key_dim: int) -> str | None:
        """Return why the kernels do not support these gates or keys; None if they do."""
        if per_channel:
            return "takes gates per head in the delta rule, but these are per channel"
        if key_dim > MAX_KEY_DIM:
            return (
                f"takes keys of up to {MAX_KEY_DIM} channels in the delta rule, but these have"
                f" {key_dim}"
            )
        return None

    def delta_slab(self) -> SlabKernel:
        """Return the fused functions for a slab (a range of chunks)."""
        from kernels.triton import delta, delta_backward

        return delta.forward, delta_backward.backward
