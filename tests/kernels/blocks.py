"""A block's attention by any backend: of single tiles, or of lists of them."""

import torch
from torch import Tensor

from kernels import attention
from kernels.attention import add_gradients_, attend_tiles_, empty_results, select_backend
from kernels.backends.base import AttentionKernel
from kernels.blocks import Gradients, Keys, Rows, Tile


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float, backend: AttentionKernel | None = None
) -> tuple[Tensor, Tensor]:
    backend = backend or select_backend("auto", q.device.type, q.dtype)
    if backend.forward is not None:
        return attention.block_forward(q, k, v, kind, scale, backend)
    attention._is_causal(q, k, kind)
    out, lse = empty_results(q.shape[:3], q, torch.promote_types(q.dtype, torch.float32))
    attend_tiles_(out, lse, q, Keys(k, v), [_whole(q, k, kind)], scale, backend)
    return out, lse


def block_backward(
    rows: Rows, keys: Keys, kind: str, scale: float, backend: AttentionKernel | None = None
) -> Gradients:
    backend = backend or select_backend("auto", rows.q.device.type, rows.q.dtype)
    if backend.backward is not None:
        return attention.block_backward(rows, keys, kind, scale, backend)
    accum_dtype = torch.promote_types(rows.q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=accum_dtype, device=x.device) for x in (rows.q, *keys))
    add_gradients_((dq, dk, dv), rows, keys, [_whole(rows.q, keys.k, kind)], scale, backend)
    return dq, dk, dv


def _whole(q: Tensor, k: Tensor, kind: str) -> Tile:
    return Tile(slice(0, q.shape[1]), slice(0, k.shape[1]), kind)
