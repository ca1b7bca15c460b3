"""Squares cut into strips: each visible pair once, each row or column of a square once, in the sizes asked for."""

import numpy as np
import pytest
import torch

from kernels.blocks import ANTI, CAUSAL, FULL, Tile
from kernels.cpu import Strips

MASKS = {CAUSAL: np.tril, ANTI: np.triu}


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", [CAUSAL, ANTI])
@pytest.mark.parametrize("side", [1, 5, 6, 7, 15, 16, 17, 31, 40])
def test_every_pair_of_a_square_is_in_one_strip(side, kind, by_rows):
    strips = Strips(16, 4, 4)
    counts = np.zeros((side + 3, side + 1), dtype=np.int64)
    tile = Tile(slice(3, 3 + side), slice(1, 1 + side), kind)
    for rows, columns, causal, mask in strips.parts([tile], torch.float32, by_rows=by_rows):
        part = np.ones((rows.stop - rows.start, columns.stop - columns.start), dtype=np.int64)
        if mask is not None:
            assert mask.shape == part.shape
            part = (mask == 0).numpy().astype(np.int64)
            assert torch.isneginf(mask[mask != 0]).all()
        if causal:
            assert mask is None
            assert part.shape[0] >= part.shape[1]
            part = np.tril(part)
        assert part.any(axis=1).all(), "a row without keys"
        if causal or mask is not None:
            assert 2 < part.shape[not by_rows] <= 6 or side <= 2
        counts[rows, columns] += part
    want = np.zeros_like(counts)
    want[3:, 1:] = MASKS[kind](np.ones((side, side), dtype=np.int64))
    np.testing.assert_array_equal(counts, want)


@pytest.mark.parametrize("kind", [CAUSAL, ANTI])
def test_a_square_of_one_step_touches_no_row_twice_forward_and_no_column_twice_backward(kind):
    strips = Strips(512, 192, 128)
    tile = Tile(slice(0, 500), slice(0, 500), kind)
    for by_rows in (True, False):
        parts = list(strips.parts([tile], torch.float32, by_rows=by_rows))
        cuts = [rows if by_rows else columns for rows, columns, _, _ in parts]
        assert [x.start for x in cuts] == [0, *(x.stop for x in cuts[:-1])]
        assert len(cuts) == (3 if by_rows else 4)


def test_a_rectangle_stays_whole():
    tile = Tile(slice(0, 1000), slice(7, 50), FULL)
    strips = Strips(16, 4, 4)
    assert list(strips.parts([tile], torch.float32, by_rows=True)) == [(tile.q, tile.k, False, None)]
