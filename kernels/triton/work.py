"""Helpers of all Triton kernels, and work lists: the tiles that touch each block.

A tile is a band: queries i and keys j with ``low <= j - i <= high``. Seen from its columns, rows
and columns change places, and so do -low and -high; so the kernels of rows and of columns share one
format. A list is made once for all layers and stays on the device.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks import ANTI, CAUSAL, TileNumbers
from runtime.tensors import cached_on_device, to_device


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Multiply matrices in float32.

    The interpreter cannot multiply bfloat16; widened operands give the same product.
    """
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def rounded(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """Round float32 x to ``dtype``; the interpreter truncates to bfloat16, so round explicitly."""
    if WIDEN and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


FAR = 1 << 30
"""A distance larger than that between any two tokens."""


@cached_on_device(256)  # each round of a ring has a few lists, which differ in each micro-batch
def work_of(
    tiles: tuple[TileNumbers, ...], size: int, by_rows: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the work list of the tiles, for blocks of ``size`` rows or columns.

    Both tensors are int32 on the device. The blocks with the most work come first, so that no long
    one is left at the end.

    Returns:
        Blocks ``[touched, 4]``: number of the block, its first and last + 1 entry, 0. Entries
        ``[n, 6]``: a tile's first and last + 1 row, first and last + 1 column, low and high; unless
        ``by_rows``, its columns come before its rows.
    """
    bands = np.array([_band(tile, by_rows) for tile in tiles])  # [tiles, 6]

    # One entry for each block that a tile touches, sorted by block.
    first = bands[:, 0] // size
    last = (bands[:, 1] - 1) // size
    counts = last - first + 1
    tile = np.repeat(np.arange(len(bands)), counts)
    block = np.arange(len(tile)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    order = np.argsort(block, kind="stable")
    block = block[order]
    entries = bands[tile[order]]

    # Find the tokens of the other side that the rows of an entry see.
    x0 = np.maximum(block * size, entries[:, 0])
    x1 = np.minimum(block * size + size, entries[:, 1]) - 1
    other_first = np.maximum(entries[:, 2], x0 + entries[:, 4])
    other_stop = np.minimum(entries[:, 3], x1 + entries[:, 5] + 1)
    visible = other_stop - other_first

    numbers, starts = np.unique(block, return_index=True)
    stops = np.append(starts[1:], len(block))
    table = np.stack([numbers, starts, stops, 0 * starts], 1)
    work = np.add.reduceat(visible, starts)
    table = table[np.argsort(-work, kind="stable")]

    host = np.concatenate([table.ravel(), entries.ravel()]).astype(np.int32)
    joined = to_device(torch.from_numpy(host), device)  # one copy to the device
    return joined[: table.size], joined[table.size :]


def _band(tile: TileNumbers, by_rows: bool) -> tuple[int, ...]:
    q0, q1, k0, k1, kind = tile
    low = k0 - q0 if kind == ANTI else -FAR
    high = k0 - q0 if kind == CAUSAL else FAR
    if by_rows:
        return q0, q1, k0, k1, low, high
    return k0, k1, q0, q1, -high, -low
