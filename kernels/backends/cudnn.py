"""cuDNN's softmax attention, the fastest from Hopper GPUs on."""

from typing import ClassVar

import torch
from torch import Tensor

from kernels.backends.base import AttentionKernel, GpuBackend, Shares, pair_of
from kernels.backends.flash_attention import flash
from kernels.blocks import Gradients, Keys, Rows, heads_first
from kernels.cuda import PackedKernel, pad_heads, with_fallback
from kernels.gpu import BLACKWELL, HOPPER, Gpu, gpu

aten = torch.ops.aten
FAST_CUDNN = 91501
"""First version of cuDNN whose attention torch prefers.

Source: check_prefer_cudnn_attention in torch's sdp_utils.cpp. An older cuDNN gives wrong results at
some lengths that 128 does not divide.
"""


class Cudnn(GpuBackend):
    """cuDNN's kernels for single tiles.

    Packed tiles go to FlashAttention, since cuDNN would pad them to the longest.
    """

    name = "cudnn"
    title = "cuDNN"
    shares: ClassVar[Shares] = {"hopper": 0.53, "h20": 0.8, "blackwell": 0.6}

    def is_automatic(self, this_gpu: Gpu, is_packed: bool) -> bool:
        """Return True if cuDNN is the fastest, and tiles have the same shapes in every micro-batch.

        cuDNN builds a graph for every new shape, forward and backward, and torch caches them all.
        """
        return prefers_cudnn(this_gpu) and not is_packed

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, fallback: AttentionKernel | None
    ) -> AttentionKernel:
        """Return cuDNN's kernels for single tiles, and FlashAttention's for packed tiles."""
        limit = f"takes heads of up to {max_head_dim()} channels on this GPU and at least 2 keys"
        tiles = with_fallback(
            self.name, limit, takes_cudnn, (cudnn_forward, cudnn_backward), pair_of(fallback)
        )
        _, packed = flash(None)
        forward, backward = pad_heads(*tiles)
        packed_kernel = PackedKernel(*pad_heads(*packed))
        return AttentionKernel(self.name, forward, backward, packed=packed_kernel)


def prefers_cudnn(this_gpu: Gpu) -> bool:
    """Return True if cuDNN's attention is correct and the fastest, by torch's own rule."""
    return this_gpu.capability[0] in (HOPPER, BLACKWELL) and this_gpu.cudnn >= FAST_CUDNN


def max_head_dim() -> int:
    """Return the maximum head width of cuDNN on this GPU (torch's check_cudnn_tensor_shapes)."""
    return 256 if gpu().capability == (HOPPER, 0) and gpu().cudnn >= 91000 else 128


def takes_cudnn(q: Tensor, k: Tensor) -> bool:
    """Return True if cuDNN's kernel supports these shapes."""
    return q.shape[-1] <= max_head_dim() and k.shape[1] > 1


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a tile and its log-sum-exp with cuDNN."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
    )
    out, lse = heads_first(out, lse.reshape(lse.shape[:3]))
    return out, lse


def cudnn_backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
    """Compute the gradients through a tile with cuDNN."""
    no_seed = torch.zeros((), dtype=torch.int64, device=rows.q.device)  # used only for dropout
    max_rows = rows.q.shape[1]
    max_columns = keys.k.shape[1]
    q, dout, out, lse, k, v = heads_first(
        rows.q, rows.dout, rows.out.to(rows.q.dtype), rows.lse.float(), *keys
    )
    lse = lse.contiguous()[..., None]
    no_bias = cu_rows = cu_columns = None
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, no_seed, no_seed, no_bias, cu_rows, cu_columns,
        max_rows, max_columns, 0.0, causal, scale=scale,
    )  # fmt: skip
    dq, dk, dv = heads_first(dq, dk, dv)
    return dq, dk, dv
