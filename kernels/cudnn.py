"""cuDNN's attention kernel through torch: a GPU's fastest from Hopper on, for the shapes that it takes.

Shapes as in ``kernels.attention``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows
from kernels.strips import heads_first
from runtime.errors import UserError

aten = torch.ops.aten
HOPPER = (9, 0)
Kernel = tuple[Callable[..., Any], Callable[..., Any]]


def capability() -> tuple[int, int]:
    """Return the compute capability of this process's GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def is_preferred() -> bool:
    """Return whether this GPU is of a kind where torch itself prefers this kernel to its FlashAttention 2."""
    return capability() >= HOPPER


@cache
def widest() -> int:
    """Return the most channels of a head that the kernel takes here, as torch's check_cudnn_tensor_shapes has it."""
    return 256 if capability() == HOPPER and (torch.backends.cudnn.version() or 0) >= 91000 else 128


def by_shape(other: Kernel | None) -> Kernel:
    """Return a forward and a backward that take this kernel where it takes the shape, and elsewhere the other's.

    Raises, when called: UserError, the shape is not this kernel's and there is no other.
    """

    def chosen(q: Tensor, k: Tensor) -> Kernel:
        if q.shape[-1] <= widest() and k.shape[1] > 1:
            return forward, backward
        if other is None:
            raise UserError(
                f"attention_backend cudnn takes heads of up to {widest()} channels here and more than one key, and "
                f"these are {q.shape[-1]} channels and {k.shape[1]} keys; use auto, aten or flash_attn"
            )
        return other

    def chosen_forward(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return chosen(q, k)[0](q, k, *rest)

    def chosen_backward(rows: Rows, keys: Keys, *rest: Any) -> tuple[Tensor, ...]:
        return chosen(rows.q, keys.k)[1](rows, keys, *rest)

    return chosen_forward, chosen_backward


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
