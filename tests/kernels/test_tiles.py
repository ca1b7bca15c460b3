"""Tiles cut smaller for a kernel cover what the large one covered."""

import numpy as np
import pytest

from kernels.attention import CAUSAL, FULL
from kernels.tiles import Tile, halved


def covered(tiles: list[Tile], side: int) -> np.ndarray:
    counts = np.zeros((side, side), dtype=np.int64)
    for tile in tiles:
        block = counts[tile.q, tile.k]
        block += np.tril(np.ones_like(block)) if tile.kind == CAUSAL else 1
    return counts


@pytest.mark.parametrize("side", [1, 7, 8, 9, 31, 64, 65, 100])
def test_a_causal_tile_cut_by_halves_covers_the_same_pairs_once(side: int) -> None:
    start = 3
    parts = list(halved(Tile(slice(start, start + side), slice(1, 1 + side), CAUSAL), 8))
    want = np.zeros((start + side, start + side), dtype=np.int64)
    want[start:, 1 : 1 + side] = np.tril(np.ones((side, side), dtype=np.int64))
    np.testing.assert_array_equal(covered(parts, start + side), want)
    assert all(part.q.stop - part.q.start <= 8 for part in parts if part.kind == CAUSAL)
    assert sum(part.pairs for part in parts) == side * (side + 1) // 2


def test_a_full_tile_stays_whole() -> None:
    tile = Tile(slice(0, 100), slice(0, 50), FULL)
    assert list(halved(tile, 8)) == [tile]
