"""Attention over a list of tiles: the visible blocks of many (query, key) pairs.

Shapes: q, dout, out and dq ``[B, T, H, D]``; k, v, dk and dv ``[B, S, K, D]``, H a multiple of K; lse ``[B, T, H]``.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.attention import AttentionBackend, block_backward, block_forward
from kernels.blocks import Tile
from kernels.merge import merge_
from kernels.packed import shared


def only_block(tiles: Sequence[Tile], rows: int, columns: int | None, backend: AttentionBackend) -> Tile | None:
    """Return the tile if it is the only one and has all rows, and all columns if these are given.

    What its kernel returns is then the sum of all tiles: to add it to zeros would only move memory. None also for a
    backend that takes lists of tiles, which continues from results.
    """
    if backend.tiled is not None or len(tiles) != 1 or tiles[0].q != slice(0, rows):
        return None
    return tiles[0] if columns is None or tiles[0].k == slice(0, columns) else None


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
    if backend.tiled is not None:
        backend.tiled.attend_(out, lse, q, k, v, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = shared(tiles)
        if small:
            backend.packed.attend_(out, lse, q, k, v, small, scale)
    for tile in tiles:
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
    if backend.tiled is not None:
        backend.tiled.add_gradients_(gradients, queries, keys, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = shared(tiles)
        if small:
            backend.packed.add_gradients_(gradients, queries, keys, small, scale)
    (dq, dk, dv), (q, dout, out, lse), (k, v) = gradients, queries, keys
    for tile in tiles:
        rows, columns = tile.q, tile.k
        blocks = dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, rows]
        parts = block_backward(*blocks, tile.kind, scale, backend)
        dq[:, rows].add_(parts[0])
        dk[:, columns].add_(parts[1])
        dv[:, columns].add_(parts[2])
