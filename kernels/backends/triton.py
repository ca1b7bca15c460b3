"""Our Triton kernels of softmax attention, linear attention and the delta rule, for a GPU."""

import torch

from kernels.backends.base import HALVES, AttentionKernel, Backend, Scan, Slab
from kernels.triton import has_triton, interpreted

MAX_KEY_DIM = 256
"""Channels of keys that the delta rule's kernels take."""


class Triton(Backend):
    """Kernels that take lists of tiles at once, and fused scans.

    On a GPU ``auto`` takes the scans for 16-bit inputs: in float32 torch's products are faster,
    since the kernels' state spills, and TF32 is slow.
    """

    name = "triton"
    softmax = linear = True
    dtypes = (torch.float32, *HALVES)

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Say what the process, the device or the dtype lacks."""
        if not has_triton():
            return "attention_backend is triton, which is not installed; use auto"
        if device_type == "cpu" and not interpreted():
            return "attention_backend triton needs a cuda device and this one is cpu; use auto"
        if dtype not in self.dtypes:
            return f"attention_backend triton takes no {dtype}; use auto or reference"
        return None

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, other: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the kernel of all tiles."""
        from kernels.triton import flash_attention

        return AttentionKernel(self.name, tiled=flash_attention)

    def is_automatic_linear(self, device_type: str, dtype: torch.dtype) -> bool:
        """Return whether this is a GPU with Triton, and 16 bits."""
        return device_type == "cuda" and dtype in HALVES and has_triton()

    def linear_scan(self) -> Scan:
        """Return the fused scan."""
        from kernels.triton import linear_attention

        return linear_attention.scan

    def delta_refusal(self, *, per_channel: bool, key_dim: int) -> str | None:
        """Say which gates or keys the kernels of the delta rule lack."""
        if per_channel:
            return "takes gates per head in the delta rule, and these are per channel"
        if key_dim > MAX_KEY_DIM:
            return f"takes keys of up to {MAX_KEY_DIM} channels in the delta rule, and these have {key_dim}"
        return None

    def delta_slab(self) -> Slab:
        """Return the fused slab."""
        from kernels.triton import delta, delta_backward

        return delta.forward, delta_backward.backward
