"""Short causal convolution of each channel, which linear attention has before its queries, keys and values.

Rows lie with a gap of K - 1 before each stretch of tokens: zeros where a document begins, else the tokens before it.
Then every output is the same sum of K shifted products, and no gap's own is read.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear_attention import check_sequence
from runtime.tensors import accum_dtype

_SLAB = 1 << 17
"""Elements that a CPU takes at a time, so that its cache holds them for all K products."""


def causal_convolution(
    x: Tensor, weight: Tensor, before: Tensor | None = None, documents: Sequence[int] | None = None
) -> Tensor:
    """Compute ``out[t, c] = sum over i < K of weight[c, K - 1 - i] x[t - i, c]``; differentiable in all tensors.

    Sums are in float32 or wider. There is no bias and no activation.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, K]``, the last of each row for the token itself.
        before: the K - 1 tokens before the first, ``[B, K - 1, C]``, default zeros; only the first document sees them.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., T); none sees the one before.

    Returns:
        ``[B, T, C]`` in x's dtype.

    Raises:
        ValueError: shapes that do not match.
    """
    check(x, weight)
    batch, length, channels = x.shape
    gap = weight.shape[1] - 1
    if before is not None and before.shape != (batch, gap, channels):
        raise ValueError(f"before has shape {tuple(before.shape)}; this x and weight make it {(batch, gap, channels)}")
    check_sequence(length, (), None, documents)
    if documents is None or len(documents) == 2:
        rows = F.pad(x, (0, 0, gap, 0)) if before is None else torch.cat((before.to(x.dtype), x), 1)
        return convolve(rows, weight)
    rows, at = spaced(x, documents, gap)
    if before is not None:
        rows = torch.cat((before.to(x.dtype), rows[:, gap:]), 1)
    return convolve(rows, weight).index_select(1, at)


def check(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError for a weight that does not fit x, or an x without tokens."""
    if weight.ndim != 2 or len(weight) != x.shape[2] or x.shape[1] == 0:
        raise ValueError(
            f"the convolution takes x [B, T, C] of some tokens and weight [C, K], and got x {tuple(x.shape)}, weight "
            f"{tuple(weight.shape)}"
        )


def convolve(rows: Tensor, weight: Tensor) -> Tensor:
    """Convolve rows ``[B, K - 1 + N, C]`` with weight ``[C, K]``: ``[B, N, C]``, differentiable."""
    found: Tensor = torch.ops.longmesh.causal_convolution(rows, weight)
    return found


def spaced(x: Tensor, bounds: Sequence[int], gap: int) -> tuple[Tensor, Tensor]:
    """Put ``gap`` zeros before each stretch of x ``[B, T, C]``, whose cumulative lengths are ``bounds``.

    Returns:
        The rows, and which of their convolution's outputs belongs to each token: int64 ``[T]``.
    """
    begins = torch.zeros(x.shape[1], dtype=torch.int64)
    begins[list(bounds[1:-1])] = gap
    at = (begins.cumsum(0) + torch.arange(x.shape[1])).to(x.device, non_blocking=True)
    stretches = max(1, len(bounds) - 1)
    return x.new_zeros(len(x), x.shape[1] + gap * stretches, x.shape[2]).index_copy(1, gap + at, x), at


@torch.library.custom_op("longmesh::causal_convolution", mutates_args=())
def _forward_op(rows: Tensor, weight: Tensor) -> Tensor:
    taps = _taps(rows, weight)
    out = rows.new_empty(_out_shape(rows, weight))
    for slab in _slabs(out):
        x = rows[:, slab.start : slab.stop + len(taps) - 1].to(taps.dtype)
        found = x[:, : slab.stop - slab.start] * taps[0]
        for i in range(1, len(taps)):
            found.addcmul_(x[:, i : i + found.shape[1]], taps[i])
        out[:, slab] = found
    return out


@_forward_op.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(_out_shape(rows, weight))


@torch.library.custom_op("longmesh::causal_convolution_backward", mutates_args=())
def _backward_op(dout: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    taps = _taps(rows, weight)
    gap = len(taps) - 1
    drows = torch.ops.longmesh.causal_convolution(F.pad(dout, (0, 0, gap, gap)), weight.flip(1))
    dtaps = torch.zeros_like(taps)
    for slab in _slabs(dout):
        x, dy = rows[:, slab.start : slab.stop + gap].to(taps.dtype), dout[:, slab].to(taps.dtype)
        for i in range(len(taps)):
            dtaps[i] += (x[:, i : i + dy.shape[1]] * dy).sum((0, 1))
    return drows, dtaps.T.to(weight.dtype, memory_format=torch.contiguous_format)


@_backward_op.register_fake
def _(dout: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


def _taps(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the weight ``[K, C]`` in float32 or wider."""
    return weight.T.to(accum_dtype(rows.dtype), memory_format=torch.contiguous_format)


def _out_shape(rows: Tensor, weight: Tensor) -> tuple[int, int, int]:
    batch, length, channels = rows.shape
    return batch, length - weight.shape[1] + 1, channels


def _slabs(out: Tensor) -> list[slice]:
    batch, length, channels = out.shape
    step = max(1, _SLAB // (batch * channels)) if out.device.type == "cpu" else length
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.longmesh.causal_convolution_backward(dout, *ctx.saved_tensors)


_forward_op.register_autograd(_gradients, setup_context=_save)
