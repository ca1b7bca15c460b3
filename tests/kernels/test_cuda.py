"""Small tiles packed into launches.

The arithmetic of indices is tested with a naive kernel in the place of a GPU's.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels import cuda, reference
from kernels.attention import select_backend
from kernels.blocks import ANTI, CAUSAL, FULL, Keys, Rows, Tile
from kernels.cuda import PackedKernel, launches, split_by_size
from tests.kernels import test_tiles
from tests.kernels.test_tiles import MASKS, attention_by_tiles, error, inputs, tiles_of, truth

CALLS = []
"""Tiles and kind of each launch of the stand-in."""


def spans(lengths):
    """Each tile's packed rows and columns; checks what a kernel takes for granted."""
    assert lengths.rows.dtype == lengths.columns.dtype == torch.int32
    sides = pairwise(lengths.rows.tolist()), pairwise(lengths.columns.tolist())
    slices = [(slice(*q), slice(*k)) for q, k in zip(*sides, strict=True)]
    assert max(q.stop - q.start for q, _ in slices) == lengths.max_rows
    assert max(k.stop - k.start for _, k in slices) == lengths.max_columns
    return slices


def forward(q, k, v, lengths, causal, scale):
    slices = spans(lengths)
    CALLS.append((len(slices), causal))
    parts = [
        reference.block_forward(q[None, rows], k[None, cols], v[None, cols], causal, scale)
        for rows, cols in slices
    ]
    out, lse = (torch.cat([part[which][0] for part in parts]) for which in (0, 1))
    assert len(out) == len(q)
    return out, lse


def backward(rows, keys, lengths, causal, scale):
    parts = []
    for rows_slice, to in spans(lengths):
        blocks = Rows(*(x[None, rows_slice] for x in rows)), Keys(*(x[None, to] for x in keys))
        parts.append(reference.block_backward(*blocks, causal, scale))
    return tuple(torch.cat([part[which][0] for part in parts]) for which in (0, 1, 2))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A backend that packs, in the place of the one that the cases of test_tiles ask for."""
    CALLS.clear()
    backend = replace(
        select_backend("reference", "cpu", torch.float64), packed=PackedKernel(forward, backward)
    )
    monkeypatch.setattr(test_tiles, "select_backend", lambda *_: backend)
    return backend


@pytest.mark.parametrize("small", [0, 5_000, 1 << 20])
@pytest.mark.parametrize("mask", MASKS)
def test_out_and_every_gradient_are_those_of_the_naive_form(mask, small, monkeypatch):
    """With no tile small enough, some and all."""
    monkeypatch.setattr(cuda, "SMALL", small)
    tensors = inputs(torch.float64)
    assert error(attention_by_tiles("", tensors, tiles_of(mask)), truth(tensors, mask)) < 1e-13
    assert bool(CALLS) == any(len(split_by_size(tiles_of(mask)[part::2])[0]) > 1 for part in (0, 1))


def test_all_squares_are_one_launch_and_all_rectangles_another():
    tiles = tiles_of("window and documents")
    attention_by_tiles("", inputs(torch.float64), tiles)
    for part in (tiles[::2], tiles[1::2]):
        rectangles = sum(tile.kind == FULL for tile in part)
        assert CALLS.pop(0) == (2 * (len(part) - rectangles), True)  # in a batch of 2
        if rectangles:
            assert CALLS.pop(0) == (2 * rectangles, False)
    assert not CALLS


def test_a_row_in_the_wrong_place_is_seen(monkeypatch):
    tensors = inputs(torch.float64)
    monkeypatch.setattr(
        cuda, "_run", lambda start, stop, _: torch.arange(start, stop).numpy()
    )  # ANTI unturned
    cuda._launches.cache_clear()
    assert (
        error(attention_by_tiles("", tensors, tiles_of("window")), truth(tensors, "window")) > 1e-3
    )
    cuda._launches.cache_clear()


def test_documents_that_lie_in_order_are_not_copied():
    squares = [Tile(slice(a, b), slice(a, b), CAUSAL) for a, b in ((0, 3), (3, 10), (10, 12))]
    (launch,) = launches(squares, torch.empty(1, 12), torch.empty(1, 12))
    assert launch.rows == launch.columns == slice(0, 12)
    assert launch.lengths.rows.tolist() == [0, 3, 10, 12]
    (step,) = launch.passes
    assert step.rows == step.packed_rows == slice(0, 12)
    (launch,) = launches(squares[1:], torch.empty(2, 12), torch.empty(2, 12))
    assert launch.rows.tolist() == [*range(3, 12), *range(15, 24)]


def test_no_row_and_no_column_appears_twice_in_a_pass():
    draw, batch, rows, columns = random.Random(2), 3, 60, 50
    tiles = []
    for _ in range(40):
        side = draw.randint(1, 12)
        q, k = draw.randint(0, rows - side), draw.randint(0, columns - side)
        tiles.append(
            Tile(slice(q, q + side), slice(k, k + side), draw.choice([CAUSAL, ANTI, FULL]))
        )
    position = torch.arange(batch * rows), torch.arange(batch * columns)
    packed_tiles = 0
    for launch in launches(tiles, torch.empty(batch, rows), torch.empty(batch, columns)):
        packed_tiles += len(launch.lengths.rows) - 1
        for step in launch.passes:
            for where, index in zip(position, (step.rows, step.columns), strict=True):
                assert len(set(where[index].tolist())) == len(where[index])
        assert [step.packed_rows.stop for step in launch.passes][-1] == launch.lengths.rows[-1]
    assert packed_tiles == batch * len(tiles)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
@pytest.mark.parametrize("mask", MASKS)
def test_packed_on_a_gpu_equals_the_naive_form(mask, monkeypatch):
    backend = select_backend("aten", "cuda", torch.bfloat16)
    monkeypatch.setattr(test_tiles, "select_backend", lambda *_: backend)
    tensors = tuple(x.cuda() for x in inputs(torch.bfloat16))
    for got, want in zip(
        attention_by_tiles("aten", tensors, tiles_of(mask)), truth(tensors, mask), strict=True
    ):
        assert ((got.double() - want).norm() / want.norm()).item() < 1e-2
