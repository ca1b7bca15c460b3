"""torch's own softmax attention: FlashAttention 2 on a GPU, strips of tiles on a CPU."""

from typing import ClassVar

import torch

from kernels import cpu_onednn
from kernels.backends.base import AttentionKernel, Backend, GpuBackend, Shares
from kernels.backends.flash_attention import flash
from kernels.cpu import Strips
from kernels.cuda import PackedKernel, pad_heads


class Aten(GpuBackend):
    """Softmax attention on any device.

    ``auto`` uses this backend if none is faster, and for shapes that a faster one does not support.
    """

    name = "aten"
    title = "FlashAttention 2"
    rate_name = "flash_attn"
    dtypes = Backend.dtypes
    shares: ClassVar[Shares] = {"hopper": 0.31, "h20": 0.6, "blackwell": 0.15}

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Return why a GPU does not support the dtype; on a CPU always None."""
        if device_type == "cpu":
            return None
        return super().refusal(requested, device_type, dtype)

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, fallback: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the kernel of FlashAttention 2 on a GPU, or of strips on a CPU."""
        if device_type == "cpu":
            # torch's kernel takes keys in blocks of 512, and queries in blocks of 32, or of 64 if
            # there are at least 192.
            rows, columns = (256, 256) if cpu_onednn.is_faster(dtype) else (192, 128)
            return AttentionKernel(self.name, tiled=Strips(512, rows, columns))
        tiles, packed = flash(None)
        forward, backward = pad_heads(*tiles)
        packed_kernel = PackedKernel(*pad_heads(*packed))
        return AttentionKernel(self.name, forward, backward, packed=packed_kernel)
