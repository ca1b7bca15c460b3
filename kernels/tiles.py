"""Attention over a list of tiles: the visible blocks of many (query, key) pairs.

Shapes: q, dout, out and dq ``[B, T, H, D]``; k, v, dk and dv ``[B, S, K, D]``, H a multiple of K; lse ``[B, T, H]``.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.attention import ANTI, FULL, AttentionBackend, block_backward, block_forward
from kernels.merge import merge_


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


def attend_tiles_(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    scale: float,
    backend: AttentionBackend,
) -> None:
    """Fold the attention of these tiles into running results, in place.

    Args:
        out, lse: results over earlier keys, float32 or wider; lse is -inf for a row without any.
    """
    for tile in _fitting(tiles, backend):
        part = block_forward(q[:, tile.q], k[:, tile.k], v[:, tile.k], tile.kind, scale, backend)
        merge_(out[:, tile.q], lse[:, tile.q], *part)


def add_gradients_(
    gradients: tuple[Tensor, ...],
    queries: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    tiles: Sequence[Tile],
    scale: float,
    backend: AttentionBackend,
) -> None:
    """Add the gradients through these tiles to (dq, dk, dv), in place.

    Args:
        gradients: sums so far, float32 or wider.
        queries: (q, dout, out, lse); out and lse are the *global* results of the rows.
        keys: (k, v).
    """
    (dq, dk, dv), (q, dout, out, lse), (k, v) = gradients, queries, keys
    for tile in _fitting(tiles, backend):
        rows, columns = tile.q, tile.k
        blocks = dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, rows]
        parts = block_backward(*blocks, tile.kind, scale, backend)
        dq[:, rows] += parts[0]
        dk[:, columns] += parts[1]
        dv[:, columns] += parts[2]


def halved(tile: Tile, leaf: int) -> Iterator[Tile]:
    """Halve a CAUSAL or ANTI tile recursively into squares of at most ``leaf`` and FULL rectangles between them."""
    side = tile.q.stop - tile.q.start
    if tile.kind == FULL or side <= leaf:
        yield tile
        return
    half = -(-side // (2 * leaf)) * leaf  # whole leaves, so that only the last is smaller
    q0, q1, q2 = tile.q.start, tile.q.start + half, tile.q.stop
    k0, k1, k2 = tile.k.start, tile.k.start + half, tile.k.stop
    yield from halved(Tile(slice(q0, q1), slice(k0, k1), tile.kind), leaf)
    yield Tile(slice(q0, q1), slice(k1, k2), FULL) if tile.kind == ANTI else Tile(slice(q1, q2), slice(k0, k1), FULL)
    yield from halved(Tile(slice(q1, q2), slice(k1, k2), tile.kind), leaf)


def _fitting(tiles: Sequence[Tile], backend: AttentionBackend) -> Iterable[Tile]:
    """Return the tiles in sizes that suit the kernel."""
    leaf = backend.causal_leaf
    return tiles if leaf is None else (part for tile in tiles for part in halved(tile, leaf))
