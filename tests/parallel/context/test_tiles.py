"""Tiles against brute force: every visible pair once, for random documents, windows and runs of positions."""

import random
from itertools import product

import numpy as np
import pytest

from kernels.attention import ANTI, CAUSAL, FULL
from kernels.blocks import Tile
from parallel.context.layout import LAYOUTS, Layout, Stride, padded_length
from parallel.context.tiles import Piece, pieces, tiles

MASKS = {CAUSAL: np.tril, ANTI: np.triu, FULL: lambda block: block}


def spelled_out(given, stride):
    """Positions and documents of the pieces, row by row."""
    positions = [np.arange(p.start, p.start + p.length * stride, stride) for p in given]
    return np.concatenate(positions), np.repeat([p.document for p in given], [p.length for p in given])


def visible(queries, keys, stride, reach):
    (q, q_document), (k, k_document) = spelled_out(queries, stride), spelled_out(keys, stride)
    behind, ahead = (10**9 if limit is None else limit for limit in reach)
    distance = k - q[:, None]
    return (
        (q_document[:, None] == k_document) & (q_document >= 0)[:, None] & (-behind <= distance) & (distance <= ahead)
    )


def covered(found, shape):
    """The times that each pair is computed; no tile has a wrong shape or count, or a masked row or column."""
    counts = np.zeros(shape, dtype=np.int64)
    for tile in found:
        mask = MASKS[tile.kind](np.ones((tile.q.stop - tile.q.start, tile.k.stop - tile.k.start), dtype=np.int64))
        assert tile.kind == FULL or mask.shape[0] == mask.shape[1]
        assert mask.sum() == tile.pairs
        assert mask.any(axis=0).all()
        assert mask.any(axis=1).all()
        counts[tile.q, tile.k] += mask
    return counts


def any_pieces(draw, length, stride):
    runs, start = [], draw.randrange(stride)
    while start < length:
        run = Stride(start, draw.randint(1, 1 + (length - start) // stride))
        runs.append(run)
        start += run.length * stride + draw.choice([0, 1, 2, stride])
    return pieces(runs, stride, tuple(sorted(draw.sample(range(1, length), 3))))


@pytest.mark.parametrize("stride", [1, 2, 5, 8])
@pytest.mark.parametrize("ahead", [0, None, 3])
def test_every_visible_pair_is_computed_once(stride, ahead):
    draw = random.Random(f"{stride} {ahead}")
    for _ in range(150):
        length = draw.randint(8, 60)
        queries, keys = (any_pieces(draw, length, stride) for _ in range(2))
        for behind in (None, 0, draw.randint(1, stride), draw.randint(1, 20), length):
            reach = behind, ahead
            want = visible(queries, keys, stride, reach)
            np.testing.assert_array_equal(covered(tiles(queries, keys, stride, reach), want.shape), want, str(reach))


def ranks_of(draw, name, size):
    """The pieces of every rank, for random documents; the last document is padding half of the time."""
    length = padded_length(name, draw.randint(2 * size, 100 + 2 * size), size)
    layout, cuts = (
        Layout(name, length, size),
        sorted(draw.sample(range(1, length), min(length - 1, draw.randint(0, 9)))),
    )
    held = [pieces(layout.strides(rank), layout.stride, tuple(cuts)) for rank in range(size)]
    padding = len(cuts) if draw.random() < 0.5 else None
    return [[p._replace(document=-1) if p.document == padding else p for p in own] for own in held], layout.stride


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 16, 61, 64])
def test_all_ranks_together_compute_every_visible_pair_once(name, size):
    """Documents and windows are random, and narrower than the stride too."""
    draw = random.Random(f"{name} {size}")
    for _ in range(3 if size < 60 else 1):
        held, stride = ranks_of(draw, name, size)
        everyone = [piece for own in held for piece in own]
        for reach in ((draw.randint(0, 2 * size + 5), 0), (None, 0), (draw.randint(0, 30), draw.randint(0, 30))):
            want = visible(everyone, everyone, stride, reach)
            ends = np.cumsum([0, *(sum(p.length for p in own) for own in held)])
            counts = np.zeros_like(want, dtype=np.int64)
            for q, k in product(range(size), repeat=2):
                part = np.ix_(range(ends[q], ends[q + 1]), range(ends[k], ends[k + 1]))
                counts[part] += covered(tiles(held[q], held[k], stride, reach), counts[part].shape)
            np.testing.assert_array_equal(counts, want, str(reach))


def test_padding_sees_nothing_and_is_not_seen():
    pieces = [Piece(0, 0, 4, 0), Piece(4, 4, 3, -1)]
    for reach in ((None, 0), (None, None), (2, 2)):
        assert covered(tiles(pieces, pieces, 1, reach), (7, 7))[:, 4:].sum() == 0
        assert sum(tile.pairs for tile in tiles(pieces, pieces, 1, reach)) == visible(pieces, pieces, 1, reach).sum()


def test_the_next_window_has_other_tiles():
    """Negative control: brute force sees a window that is one key too wide, and one that is too narrow."""
    (given,) = (any_pieces(random.Random(3), 60, 1),)
    for wrong in (6, 8):
        got = covered(tiles(given, given, 1, (wrong, 0)), visible(given, given, 1, (7, 0)).shape)
        assert (got != visible(given, given, 1, (7, 0))).any()


def test_what_lies_together_is_joined():
    two = [Piece(0, 0, 4, 0), Piece(8, 4, 4, 0)]
    assert tiles(two, two, 1, (None, 0)) == (Tile(slice(0, 8), slice(0, 8), CAUSAL),)
    assert tiles(two, two, 1, (0, None)) != tiles(two, two, 1, (None, 0))
    assert tiles(two, two, 1, (0, None)) == (Tile(slice(0, 8), slice(0, 8), ANTI),)
    assert tiles(two, two, 1, (None, None)) == (Tile(slice(0, 8), slice(0, 8), FULL),)
