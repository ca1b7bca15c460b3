"""Squares cut by halves and into strips, each visible pair once.

Sinks as in gpt-oss's attention, in float64.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.attention import select_backend
from kernels.blocks import (
    ANTI,
    CAUSAL,
    FULL,
    Keys,
    Rows,
    Tile,
    halved,
    merged,
    sinks_gradient,
    with_sinks,
)
from kernels.cpu import Strips
from tests.kernels.blocks import block_backward

BOUND = 1e-12
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


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", [CAUSAL, ANTI])
@pytest.mark.parametrize("side", [1, 5, 6, 7, 15, 16, 17, 31, 40])
def test_every_pair_of_a_square_is_in_one_strip(side, kind, by_rows):
    strips = Strips(16, 4, 4)
    counts = np.zeros((side + 3, side + 1), dtype=np.int64)
    tile = Tile(slice(3, 3 + side), slice(1, 1 + side), kind)
    for rows, columns, causal, mask in strips.cut([tile], torch.float32, by_rows=by_rows):
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
        parts = list(strips.cut([tile], torch.float32, by_rows=by_rows))
        cuts = [rows if by_rows else columns for rows, columns, _, _ in parts]
        assert [x.start for x in cuts] == [0, *(x.stop for x in cuts[:-1])]
        assert len(cuts) == (3 if by_rows else 4)


def test_a_rectangle_stays_whole():
    tile = Tile(slice(0, 1000), slice(7, 50), FULL)
    strips = Strips(16, 4, 4)
    assert list(halved(tile, 8)) == [tile]
    assert list(strips.cut([tile], torch.float32, by_rows=True)) == [(tile.q, tile.k, False, None)]


def inputs(dtype=torch.float64):
    """q, k, v, sinks and dout of 4 heads, two per key head.

    Sinks far above and below the scores, too.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 9, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8), (2, 9, 4, 8)]
    q, k, v, dout = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return q, k, v, torch.tensor([0.3, -1.5, 30.0, -60.0], dtype=dtype), dout


def expected():
    """Return out, dq, dk, dv and dsinks of transformers' gpt-oss, under no mask."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    *leaves, dout = inputs()
    q, k, v, sinks = (x.requires_grad_() for x in leaves)
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    out = eager_attention_forward(
        module, *(x.transpose(1, 2) for x in (q, k, v)), None, scaling=8**-0.5
    )[0]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), dout)]


def in_blocks(gradient_lse="with sinks"):
    """Return the same from two blocks of keys, merged, then sinks.

    The backward takes the global results.
    """
    q, k, v, sinks, dout = inputs()
    halves = (slice(0, 5), slice(5, 12))
    blocks = [reference.block_forward(q, k[:, half], v[:, half], False, 8**-0.5) for half in halves]
    plain = merged(*(torch.stack(parts) for parts in zip(*blocks, strict=True)))
    out, lse = with_sinks(*plain, sinks)
    backend = select_backend("reference", "cpu", torch.float64)
    saved_lse = lse if gradient_lse == "with sinks" else plain[1]
    rows = Rows(q, dout, out, saved_lse)
    parts = [
        block_backward(rows, Keys(k[:, half], v[:, half]), FULL, 8**-0.5, backend)
        for half in halves
    ]
    dq, dk, dv = zip(*parts, strict=True)
    return [
        out,
        sum(dq),
        torch.cat(dk, 1),
        torch.cat(dv, 1),
        sinks_gradient(dout, out, saved_lse, sinks),
    ]


def test_sinks_and_all_gradients_equal_those_of_gpt_oss():
    want = expected()
    for got, expected_gradient in zip(in_blocks(), want, strict=True):
        assert (got - expected_gradient).abs().max() < BOUND * max(
            1.0, expected_gradient.abs().max().item()
        )
    for got, expected_gradient in zip(
        in_blocks("plain")[1:], want[1:], strict=True
    ):  # negative control: an lse without sinks
        assert (got - expected_gradient).norm() > 1e-3 * expected_gradient.norm()


def test_a_row_without_keys_is_zero_and_has_the_sinks_lse():
    sinks = torch.tensor([0.5, -2.0])
    out, lse = with_sinks(torch.zeros(1, 3, 2, 4), torch.full((1, 3, 2), float("-inf")), sinks)
    assert torch.equal(out, torch.zeros(1, 3, 2, 4))
    assert torch.equal(lse, sinks.expand(1, 3, 2))
    assert torch.equal(sinks_gradient(torch.ones_like(out), out, lse, sinks), torch.zeros(2))


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_scores_overflow_nothing(sink):
    """The first is as good as none, the second leaves nothing."""
    out, lse = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2)
    got, with_sink = with_sinks(out, lse, torch.full((2,), sink))
    assert torch.equal(got, out if sink < 0 else torch.zeros_like(out))
    assert torch.equal(with_sink, lse if sink < 0 else torch.full_like(lse, sink))
    gradient = sinks_gradient(torch.ones_like(out), got, with_sink, torch.full((2,), sink))
    assert torch.equal(gradient, torch.zeros(2))


def test_bfloat16_sinks_are_added_in_the_dtype_of_lse():
    out, lse, sinks = (
        torch.randn(1, 5, 2, 4),
        torch.randn(1, 5, 2),
        torch.tensor([0.1, -3.3]).bfloat16(),
    )
    for got, want in zip(
        with_sinks(out, lse, sinks), with_sinks(out, lse, sinks.float()), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    assert sinks_gradient(out.bfloat16(), out, lse, sinks).dtype == torch.float32
