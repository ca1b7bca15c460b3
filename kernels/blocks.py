"""Blocks of visible (query, key) pairs, their operands, and the merge of partial results.

Three kinds of blocks suffice: FULL, any rectangle; CAUSAL, a square where query i sees keys j <= i;
and ANTI, a square where query i sees keys j >= i.

Partial results over disjoint keys merge by their lse, the log of a row's sum of exponentials (Rabe
and Staats 2021): the merged out is the mean of the parts, weighted with exp(lse). Only differences
of lse are exponentiated, so nothing overflows, and the parts may come in any order and from any
rank.

A sink is one more key per head, with a learned score and a value of 0, so it appears only in the
softmax's denominator. The off-by-one softmax fixes the score at 0 (Miller 2023, "Attention is off
by one"); gpt-oss and Megatron-LM learn the scores. A sink needs no tile: it is added once to the
global results of all real keys, and the gradients of tiles, which take these results, need no
change.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.triton import has_triton

FULL = "full"
CAUSAL = "causal"
ANTI = "anti"
TileNumbers = tuple[int, int, int, int, str]
"""A tile as numbers: first row, last row + 1, first column, last column + 1, and kind."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv, with the shapes of q, k and v."""


class Rows(NamedTuple):
    """Backward operands per query: q, dout and out ``[B, T, H, D]``, lse ``[B, T, H]``.

    out and lse are the *global* results of the rows, over all their keys.
    """

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


class Keys(NamedTuple):
    """Keys and values ``[B, S, K, D]``; H is a multiple of K."""

    k: Tensor
    v: Tensor


class Tile(NamedTuple):
    """A rectangle of pairs: queries ``q`` (a slice of rows) and keys ``k`` (a slice of columns)."""

    q: slice
    k: slice
    kind: str

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        rows = self.q.stop - self.q.start
        columns = self.k.stop - self.k.start
        if self.kind == FULL:
            return rows * columns
        return rows * (rows + 1) // 2

    @property
    def hidden(self) -> int:
        """Number of pairs in the tile that its mask hides."""
        rows = self.q.stop - self.q.start
        columns = self.k.stop - self.k.start
        return rows * columns - self.pairs

    def rounded(self, block: tuple[int, int]) -> int:
        """Number of hidden pairs that a kernel computes which skips only whole blocks of pairs.

        Along the edge of the mask, blocks of (queries, keys) have both visible and hidden pairs.
        """
        if self.kind == FULL or block == (1, 1):
            return 0
        block_queries, block_keys = block
        side = self.q.stop - self.q.start
        starts = np.arange(0, side, block_queries)
        ends = np.minimum(starts + block_queries, side)  # last key + 1 that a block's queries see
        keys = np.minimum(-(-ends // block_keys) * block_keys, side)
        return int(((ends - starts) * keys).sum()) - self.pairs


def as_numbers(tiles: Sequence[Tile]) -> tuple[TileNumbers, ...]:
    """Return the tiles as numbers, which are hashable and can be a cache key."""
    return tuple([(q.start, q.stop, k.start, k.stop, kind) for q, k, kind in tiles])


def halved(tile: Tile, max_side: int) -> Iterator[Tile]:
    """Halve a CAUSAL or ANTI tile recursively into squares and the FULL rectangles between them.

    The squares have at most ``max_side`` rows, and about equal sizes.
    """
    side = tile.q.stop - tile.q.start
    if tile.kind == FULL or side <= max_side:
        yield tile
        return
    squares = -(-side // max_side)
    half = -(-squares // 2) * -(-side // squares)
    q_middle = tile.q.start + half
    k_middle = tile.k.start + half
    first_q = slice(tile.q.start, q_middle)
    last_q = slice(q_middle, tile.q.stop)
    first_k = slice(tile.k.start, k_middle)
    last_k = slice(k_middle, tile.k.stop)

    yield from halved(Tile(first_q, first_k, tile.kind), max_side)
    if tile.kind == ANTI:
        yield Tile(first_q, last_k, FULL)
    else:
        yield Tile(last_q, first_k, FULL)
    yield from halved(Tile(last_q, last_k, tile.kind), max_side)


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Swap [B, T, H, ...] and [B, H, T, ...], returning views.

    A tensor is copied first if its heads are not contiguous, since kernels need contiguous heads.
    """
    return tuple(in_one_piece(x).transpose(1, 2) for x in tensors)


def in_one_piece(x: Tensor) -> Tensor:
    """Return x ``[B, T, H, D]``, copied unless its heads are contiguous; an lse is not copied."""
    return x if x.ndim < 4 or x.stride(-1) == 1 else x.contiguous()


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge one block's result into the running result of the same rows, in place.

    With w = sigmoid(block_lse - lse) the merged rows are out + w (block_out - out). No score is
    exponentiated, so nothing overflows. A row that has seen no keys yet has lse = -inf and takes
    the block's values.

    Args:
        out, block_out: ``[B, T, H, D]``, or of any shape ``[..., D]``; ``out`` float32 or wider.
        lse, block_lse: ``[B, T, H]``, or ``[...]``; ``lse`` float32 or wider; ``block_lse`` finite.
    """
    if out.is_cuda and out.dtype == torch.float32 and out.ndim in (3, 4) and has_triton():
        from kernels.triton.pointwise import merge_ as fused_merge_

        fused_merge_(out, lse, block_out, block_lse)
        return
    weight = torch.sigmoid(block_lse - lse).to(out.dtype)  # [B, T, H]
    out.lerp_(block_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, block_lse.to(lse.dtype), out=lse)


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge C partial results over disjoint keys into one.

    Args:
        out: ``[C, B, T, H, D]``, float32 or wider.
        lse: ``[C, B, T, H]``; -inf if a part has no key for a row.

    Returns:
        out ``[B, T, H, D]`` and lse ``[B, T, H]``; 0 and -inf for a row without any key, such as
        padding.
    """
    weight = torch.softmax(lse, 0)  # exponentiates only differences: nothing overflows
    no_keys = (lse == float("-inf")).all(0)  # [B, T, H]
    weight = weight.masked_fill(no_keys, 0)
    return (out * weight[..., None]).sum(0), torch.logsumexp(lse, 0)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink to the softmax denominator of every row.

    A row without keys (out 0, lse -inf) keeps out 0, and its lse becomes the sink's score.

    Args:
        out, lse: global results of the rows, float32 or wider.
        sinks: ``[H]``, the score of each head's sink, of any float dtype.

    Returns:
        out ``[B, T, H, D]`` and lse ``[B, T, H]``, in the arguments' dtypes.
    """
    sinks = sinks.to(lse.dtype)
    # exp(lse) / (exp(lse) + exp(sink)), without an exponential of either, which could overflow.
    weight = torch.sigmoid(lse - sinks)
    return out * weight.to(out.dtype)[..., None], torch.logaddexp(lse, sinks)


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return dsinks ``[H]``, in lse's dtype: - sum over rows of exp(sink - lse) * (dout . out).

    Args:
        dout: gradient of ``out``.
        out, lse: results of ``with_sinks``.
        sinks: as for ``with_sinks``.
    """
    sink_share = torch.exp(sinks.to(lse.dtype) - lse)  # the sink's weight in the softmax, at most 1
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, T, H]
    return -(sink_share * delta).sum((0, 1))
