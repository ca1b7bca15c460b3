"""Blocks of visible (query, key) pairs: kinds, tiles, how squares are cut, and the operands of their attention.

Three kinds suffice: FULL, any rectangle; CAUSAL, a square where query i sees keys j <= i; and ANTI, a square where
query i sees keys j >= i.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

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
    """Halve a CAUSAL or ANTI tile recursively into squares of at most ``leaf`` and FULL rectangles between them."""
    side = tile.q.stop - tile.q.start
    if tile.kind == FULL or side <= leaf:
        yield tile
        return
    leaves = -(-side // leaf)  # of equal size
    half = -(-leaves // 2) * -(-side // leaves)
    q0, q1, q2 = tile.q.start, tile.q.start + half, tile.q.stop
    k0, k1, k2 = tile.k.start, tile.k.start + half, tile.k.stop
    yield from halved(Tile(slice(q0, q1), slice(k0, k1), tile.kind), leaf)
    yield Tile(slice(q0, q1), slice(k1, k2), FULL) if tile.kind == ANTI else Tile(slice(q1, q2), slice(k0, k1), FULL)
    yield from halved(Tile(slice(q1, q2), slice(k1, k2), tile.kind), leaf)
