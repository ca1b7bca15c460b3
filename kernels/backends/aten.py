"""torch's own attention: FlashAttention 2 on a GPU, strips on a CPU."""

from typing import ClassVar

import torch

from kernels import cpu
from kernels.backends.base import AttentionKernel, Backend, GpuBackend, Shares
from kernels.backends.flash_attention import flash
from kernels.cpu import Strips
from kernels.cuda import Packed, pad_heads


class Aten(GpuBackend):
    """Softmax attention on any device.

    ``auto`` takes it where nothing is faster, and for shapes that the faster kernel does not take.
    """

    name = "aten"
    title = "FlashAttention 2"
    rate_name = "flash_attn"
    dtypes = Backend.dtypes
    shares: ClassVar[Shares] = {"hopper": 0.31, "h20": 0.6, "blackwell": 0.15}

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Say what the dtype lacks on a GPU."""
        return None if device_type == "cpu" else super().refusal(requested, device_type, dtype)

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, other: AttentionKernel | None
    ) -> AttentionKernel:
        """Return FlashAttention 2, or the strips of a CPU."""
        if device_type == "cpu":
            # The kernel steps over keys by 512, and over queries by 32, or by 64 from 192 on.
            strip = (256, 256) if cpu.is_faster(dtype) else (192, 128)
            return AttentionKernel(self.name, tiled=Strips(512, *strip))
        tiles, packed = flash(None)
        return AttentionKernel(self.name, *pad_heads(*tiles), packed=Packed(*pad_heads(*packed)))
