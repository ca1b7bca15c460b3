"""cuDNN's attention kernel through torch: a GPU's fastest from Hopper on, for the shapes that it takes.

Shapes as in ``kernels.attention``.
"""

import torch
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows
from kernels.installed import HOPPER, gpu
from kernels.strips import heads_first

aten = torch.ops.aten


def widest() -> int:
    """Return the most channels of a head that the kernel takes here, as torch's check_cudnn_tensor_shapes has it."""
    return 256 if gpu().capability == (HOPPER, 0) and gpu().cudnn >= 91000 else 128


def takes(q: Tensor, k: Tensor) -> bool:
    """Return whether the kernel takes these shapes."""
    return q.shape[-1] <= widest() and k.shape[1] > 1


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
    )
    out, lse = heads_first(out, lse.reshape(lse.shape[:3]))
    return out, lse


def backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
    no_seed = torch.zeros((), dtype=torch.int64, device=rows.q.device)  # unused without dropout
    lengths = (rows.q.shape[1], keys.k.shape[1])
    q, dout, out, lse, k, v = heads_first(rows.q, rows.dout, rows.out.to(rows.q.dtype), rows.lse.float(), *keys)
    given = dout, q, k, v, out, lse.contiguous()[..., None], no_seed, no_seed, None, None, None, *lengths, 0.0, causal
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(*given, scale=scale)
    dq, dk, dv = heads_first(dq, dk, dv)
    return dq, dk, dv
