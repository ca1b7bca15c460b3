"""Blocks of visible (query, key) pairs, the operands of their attention, and the merge of partial
results.

Three kinds of blocks suffice: FULL, any rectangle; CAUSAL, a square where query i sees keys j <= i;
and ANTI, a square where query i sees keys j >= i.

A sink is one more key per head, with a score of its own and a value of 0, in the softmax's
denominator. off-by-one is a score of 0 (Miller 2023, "Attention is off by one"); gpt-oss and
Megatron-LM learn the scores. A sink needs no tile: it is added once to the global results of all
real keys, and the gradients of tiles, which take these results, then hold as they are.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.triton import has_triton

FULL = "full"
CAUSAL = "causal"
ANTI = "anti"
TileNumbers = tuple[int, int, int, int, str]
"""A tile in numbers: first and last + 1 of the rows, of the columns; kind."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv, of the shapes of q, k and v."""


class Rows(NamedTuple):
    """A backward's operands of queries: q, dout and out ``[B, T, H, D]``, lse ``[B, T, H]``.

    out and lse are the *global* results of the rows, over all their keys.
    """

    q: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor


class Keys(NamedTuple):
    """Keys and values ``[B, S, K, D]``, H a multiple of K."""

    k: Tensor
    v: Tensor


class Tile(NamedTuple):
    """Queries ``q`` (a slice of rows) against keys ``k`` (a slice of columns)."""

    q: slice
    k: slice
    kind: str

    @property
    def pairs(self) -> int:
        """Count the visible (query, key) pairs of the tile."""
        rows, columns = self.q.stop - self.q.start, self.k.stop - self.k.start
        return rows * columns if self.kind == FULL else rows * (rows + 1) // 2

    @property
    def hidden(self) -> int:
        """Count the pairs of the tile that its mask hides."""
        return (self.q.stop - self.q.start) * (self.k.stop - self.k.start) - self.pairs


def as_numbers(tiles: Sequence[Tile]) -> tuple[TileNumbers, ...]:
    """Return the tiles as numbers, which can be a key."""
    return tuple([(q.start, q.stop, k.start, k.stop, kind) for q, k, kind in tiles])


def halved(tile: Tile, leaf: int) -> Iterator[Tile]:
    """Halve a CAUSAL or ANTI tile recursively into squares of at most ``leaf`` and FULL rectangles
    between them.
    """
    side = tile.q.stop - tile.q.start
    if tile.kind == FULL or side <= leaf:
        yield tile
        return
    leaves = -(-side // leaf)  # of equal size
    half = -(-leaves // 2) * -(-side // leaves)
    q0, q1, q2 = tile.q.start, tile.q.start + half, tile.q.stop
    k0, k1, k2 = tile.k.start, tile.k.start + half, tile.k.stop
    yield from halved(Tile(slice(q0, q1), slice(k0, k1), tile.kind), leaf)
    yield (
        Tile(slice(q0, q1), slice(k1, k2), FULL)
        if tile.kind == ANTI
        else Tile(slice(q1, q2), slice(k0, k1), FULL)
    )
    yield from halved(Tile(slice(q1, q2), slice(k1, k2), tile.kind), leaf)


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Swap [B, T, H, ...] and [B, H, T, ...], as views; copy only where a head is not contiguous,
    as kernels need.
    """
    return tuple(in_one_piece(x).transpose(1, 2) for x in tensors)


def in_one_piece(x: Tensor) -> Tensor:
    """Return x ``[B, T, H, D]`` with contiguous heads, copied if need be; lse ``[B, T, H]`` as it
    is.
    """
    return x if x.ndim < 4 or x.stride(-1) == 1 else x.contiguous()


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block's result into the running result of the same rows, in place.

    With w = sigmoid(block_lse - lse) the merged rows are out + w (block_out - out): no bare
    exponential, so nothing overflows. A row without keys so far has lse = -inf and takes the
    block's values.

    Args:
        out, block_out: ``[B, T, H, D]``, or of any shape ``[..., D]``; ``out`` float32 or wider.
        lse, block_lse: ``[B, T, H]``, or ``[...]``; ``lse`` float32 or wider; ``block_lse`` finite.
    """
    if out.is_cuda and out.dtype == torch.float32 and out.ndim in (3, 4) and has_triton():
        from kernels.triton.pointwise import merge_ as in_one_launch

        in_one_launch(out, lse, block_out, block_lse)
        return
    weight = torch.sigmoid(block_lse - lse).to(out.dtype)  # [B, T, H]
    out.lerp_(block_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, block_lse.to(lse.dtype), out=lse)


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge C partial results over disjoint keys into one.

    Args:
        out: ``[C, B, T, H, D]``, float32 or wider.
        lse: ``[C, B, T, H]``; -inf where a part has no key for a row.

    Returns:
        out ``[B, T, H, D]`` and lse ``[B, T, H]``; 0 and -inf for a row without any key, such as
        padding.
    """
    weight = torch.softmax(lse, 0)  # of differences from the largest, so nothing overflows
    weight = weight.masked_fill((lse == float("-inf")).all(0), 0)
    return (out * weight[..., None]).sum(0), torch.logsumexp(lse, 0)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out ``[B, T, H, D]`` and lse ``[B, T, H]`` with a sink in every row's denominator, in
    their dtypes.

    A row without keys, of out 0 and lse -inf, stays 0 and has the lse of its sink.

    Args:
        out, lse: global results of the rows, float32 or wider.
        sinks: ``[H]``, the score of each head's sink, of any float dtype.
    """
    sinks = sinks.to(lse.dtype)
    weight = torch.sigmoid(
        lse - sinks
    )  # exp(lse) / (exp(lse) + exp(sink)); no bare exponential, so nothing overflows
    return out * weight.to(out.dtype)[..., None], torch.logaddexp(lse, sinks)


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return dsinks ``[H]``, in lse's dtype: - sum over rows of exp(sink - lse) * (dout . out).

    Args:
        dout: gradient of ``out``.
        out, lse: results of ``with_sinks``.
        sinks: as there.
    """
    share = torch.exp(sinks.to(lse.dtype) - lse)  # of the softmax, at most 1
    return -(share * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 1))
