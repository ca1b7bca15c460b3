"""Short causal convolution of each channel, which linear attention has before its queries, keys and
values.

Rows lie with a gap of K - 1 before each stretch of tokens: zeros where a document begins, else the
tokens before it. Then every output is the same sum of K shifted products, and no gap's own is read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.tensors import accum_dtype

_SLAB = 1 << 17
"""Elements that a CPU takes at a time, so that its cache holds them for all K products."""


def check(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError for a weight that does not fit x, or an x without tokens."""
    if weight.ndim != 2 or len(weight) != x.shape[2] or x.shape[1] == 0:
        raise ValueError(
            f"the convolution takes x [B, T, C] of some tokens and weight [C, K], and got x {tuple(x.shape)}, weight "
            f"{tuple(weight.shape)}"
        )


def spaced(x: Tensor, bounds: Sequence[int], gap: int) -> tuple[Tensor, Tensor]:
    """Put ``gap`` zeros before each stretch of x ``[B, T, C]``, whose cumulative lengths are
    ``bounds``.

    Returns:
        The rows, and which of their convolution's outputs belongs to each token: int64 ``[T]``.
    """
    begins = torch.zeros(x.shape[1], dtype=torch.int64)
    begins[list(bounds[1:-1])] = gap
    at = (begins.cumsum(0) + torch.arange(x.shape[1])).to(x.device, non_blocking=True)
    stretches = max(1, len(bounds) - 1)
    return x.new_zeros(len(x), x.shape[1] + gap * stretches, x.shape[2]).index_copy(
        1, gap + at, x
    ), at


def forward(rows: Tensor, weight: Tensor) -> Tensor:
    """Convolve rows ``[B, K - 1 + N, C]`` with weight ``[C, K]``: ``[B, N, C]``."""
    taps = _taps(rows, weight)
    out = rows.new_empty(out_shape(rows, weight))
    for slab in _slabs(out):
        x = rows[:, slab.start : slab.stop + len(taps) - 1].to(taps.dtype)
        total = x[:, : slab.stop - slab.start] * taps[0]
        for i in range(1, len(taps)):
            total.addcmul_(x[:, i : i + total.shape[1]], taps[i])
        out[:, slab] = total
    return out


def weight_gradient(dout: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return the weight's gradient, given that of the output ``[B, N, C]``."""
    taps = _taps(rows, weight)
    dtaps = torch.zeros_like(taps)
    for slab in _slabs(dout):
        x, dy = (
            rows[:, slab.start : slab.stop + len(taps) - 1].to(taps.dtype),
            dout[:, slab].to(taps.dtype),
        )
        for i in range(len(taps)):
            dtaps[i] += (x[:, i : i + dy.shape[1]] * dy).sum((0, 1))
    return dtaps.T.to(weight.dtype, memory_format=torch.contiguous_format)


def out_shape(rows: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return the shape of the output."""
    batch, length, channels = rows.shape
    return batch, length - weight.shape[1] + 1, channels


def _taps(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the weight ``[K, C]`` in float32 or wider."""
    return weight.T.to(accum_dtype(rows.dtype), memory_format=torch.contiguous_format)


def _slabs(out: Tensor) -> list[slice]:
    batch, length, channels = out.shape
    step = max(1, _SLAB // (batch * channels)) if out.device.type == "cpu" else length
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]
