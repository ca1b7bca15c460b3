"""Squares cut by halves cover what the whole ones covered."""

import numpy as np
import pytest

from kernels.blocks import ANTI, CAUSAL, FULL, Tile, halved

MASKS = {CAUSAL: np.tril, ANTI: np.triu, FULL: lambda block: block}


def covered(tiles, side):
    counts = np.zeros((side, side), dtype=np.int64)
    for tile in tiles:
        block = counts[tile.q, tile.k]
        block += MASKS[tile.kind](np.ones_like(block))
    return counts


@pytest.mark.parametrize("kind", [CAUSAL, ANTI])
@pytest.mark.parametrize("side", [1, 7, 8, 9, 31, 64, 65, 100])
def test_a_square_cut_by_halves_covers_the_same_pairs_once(side, kind):
    start = 3
    parts = list(halved(Tile(slice(start, start + side), slice(1, 1 + side), kind), 8))
    want = np.zeros((start + side, start + side), dtype=np.int64)
    want[start:, 1 : 1 + side] = MASKS[kind](np.ones((side, side), dtype=np.int64))
    np.testing.assert_array_equal(covered(parts, start + side), want)
    assert all(part.q.stop - part.q.start <= 8 for part in parts if part.kind == kind)
    assert sum(part.pairs for part in parts) == side * (side + 1) // 2


def test_a_full_tile_stays_whole():
    tile = Tile(slice(0, 100), slice(0, 50), FULL)
    assert list(halved(tile, 8)) == [tile]
