"""Short causal convolution of each channel of queries, keys and values, for linear attention.

The rows of packed documents have a gap of K - 1 before each document: zeros, or for the first one
the tokens before it. Then every output is the same sum of K shifted products, with no condition per
document, and the outputs of the gaps are never read.

Shapes: B sequences, T tokens, C channels, K taps, N outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.tensors import accum_dtype

_SLAB = 1 << 17
"""Number of elements that a CPU convolves at a time, so that its cache holds them for all K
products."""


def check(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError for a weight that does not fit x, or an x without tokens."""
    if weight.ndim != 2 or len(weight) != x.shape[2] or x.shape[1] == 0:
        raise ValueError(
            "the convolution takes x [B, T, C] with at least one token and weight [C, K], but got"
            f" x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )


def spaced(x: Tensor, cu_seqlens: Sequence[int], gap: int) -> tuple[Tensor, Tensor]:
    """Insert ``gap`` zeros before each document of x ``[B, T, C]``.

    Returns:
        The rows, and the index of each token's output in their convolution, int64 ``[T]``.
    """
    skipped = torch.zeros(x.shape[1], dtype=torch.int64)
    skipped[list(cu_seqlens[1:-1])] = gap
    index = skipped.cumsum(0) + torch.arange(x.shape[1])
    index = index.to(x.device, non_blocking=True)
    num_documents = max(1, len(cu_seqlens) - 1)
    rows = x.new_zeros(len(x), x.shape[1] + gap * num_documents, x.shape[2])
    return rows.index_copy(1, gap + index, x), index


def forward(rows: Tensor, weight: Tensor) -> Tensor:
    """Convolve rows ``[B, K - 1 + N, C]`` with weight ``[C, K]``: ``[B, N, C]``."""
    taps = _taps(rows, weight)
    out = rows.new_empty(out_shape(rows, weight))
    for slab in _slabs(out):
        length = slab.stop - slab.start
        x = rows[:, slab.start : slab.stop + len(taps) - 1].to(taps.dtype)
        total = x[:, :length] * taps[0]
        for i in range(1, len(taps)):
            total.addcmul_(x[:, i : i + length], taps[i])
        out[:, slab] = total
    return out


def weight_gradient(dout: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weight, given the gradient of the output ``[B, N, C]``."""
    taps = _taps(rows, weight)
    dtaps = torch.zeros_like(taps)
    for slab in _slabs(dout):
        x = rows[:, slab.start : slab.stop + len(taps) - 1].to(taps.dtype)
        dy = dout[:, slab].to(taps.dtype)
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
    step = length
    if out.device.type == "cpu":
        step = max(1, _SLAB // (batch * channels))
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]
