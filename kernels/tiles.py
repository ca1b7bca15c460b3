"""Attention over a list of tiles: the visible blocks of many (query, key) pairs.

Shapes as in ``kernels.blocks``.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.attention import AttentionBackend, block_backward, block_forward
from kernels.blocks import Gradients, Keys, Rows, Tile
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
    out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float, backend: AttentionBackend
) -> None:
    """Fold the attention of these tiles into running results, in place.

    Args:
        out, lse: results over earlier keys, float32 or wider; lse is -inf for a row without any.
    """
    if backend.tiled is not None:
        backend.tiled.attend_(out, lse, q, keys, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = shared(tiles)
        if small:
            backend.packed.attend_(out, lse, q, keys, small, scale)
    for tile in tiles:
        part = block_forward(q[:, tile.q], keys.k[:, tile.k], keys.v[:, tile.k], tile.kind, scale, backend)
        merge_(out[:, tile.q], lse[:, tile.q], *part)


def add_gradients_(
    sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float, backend: AttentionBackend
) -> None:
    """Add the gradients through these tiles to the sums so far, float32 or wider, in place."""
    if backend.tiled is not None:
        backend.tiled.add_gradients_(sums, rows, keys, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = shared(tiles)
        if small:
            backend.packed.add_gradients_(sums, rows, keys, small, scale)
    for tile in tiles:
        blocks = Rows(*(x[:, tile.q] for x in rows)), Keys(*(x[:, tile.k] for x in keys))
        parts = block_backward(*blocks, tile.kind, scale, backend)
        for total, part, at in zip(sums, parts, (tile.q, tile.k, tile.k), strict=True):
            total[:, at].add_(part)
