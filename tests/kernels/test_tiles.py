"""Attention over lists of tiles against the naive form in float64: windows, documents, and both."""

import pytest
import torch

from kernels import reference
from kernels.attention import attend_tiles_, select_backend
from kernels.blocks import Keys
from parallel.context.layout import Stride
from parallel.context.tiles import pieces, tiles
from tests.kernels.attention_cases import folded

TOKENS, HEADS, KV_HEADS, WIDTH, SCALE = 600, 2, 1, 8, 0.2
CU_SEQLENS = (0, 1, 30, 250, 265, 600)
MASKS = {
    "causal": ((None, 0), None),
    "window": ((100, 0), None),
    "a window that no strip divides": ((37, 0), None),
    "a key": ((0, 0), None),
    "window ahead": ((None, 5), None),
    "window on both sides": ((33, 200), None),
    "documents": ((None, 0), CU_SEQLENS),
    "documents, not causal": ((None, None), CU_SEQLENS),
    "window and documents": ((64, 0), CU_SEQLENS),
    "window on both sides and documents": ((64, 3), CU_SEQLENS),
}


def inputs(dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, TOKENS, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )


def tiles_of(mask):
    reach, cu_seqlens = MASKS[mask]
    tile_pieces = pieces([Stride(0, TOKENS)], 1, cu_seqlens[1:-1] if cu_seqlens else ())
    return tiles(tile_pieces, tile_pieces, 1, reach)


def attention_by_tiles(name, tensors, all_tiles):
    """[out, lse, dq, dk, dv] of all tiles; half of them in a second call."""
    q = tensors[0]
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    return folded(
        select_backend(name, "cpu", q.dtype),
        tensors,
        (all_tiles[::2], all_tiles[1::2]),
        SCALE,
        accum_dtype,
    )


def truth(tensors, mask):
    window, cu_seqlens = MASKS[mask]
    *leaves, dout = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = reference.attention(
        *leaves, causal=False, scale=SCALE, window=window, cu_seqlens=cu_seqlens
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def error(got, want):
    return max(
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item()
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["aten", "reference"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.bfloat16, 1e-5)])
def test_out_and_every_gradient_are_those_of_the_naive_form(mask, name, dtype, bound):
    tensors = inputs(dtype)
    assert error(attention_by_tiles(name, tensors, tiles_of(mask)), truth(tensors, mask)) < bound


@pytest.mark.parametrize(
    ("mask", "wrong"),
    [
        ("window", ((99, 0), None)),
        ("window", ((101, 0), None)),
        ("documents", ((None, 0), (0, 1, 30, 251, 265, 600))),
    ],
)
def test_a_mask_off_by_one_is_seen(mask, wrong, monkeypatch):
    tensors = inputs(torch.float64)
    want = truth(tensors, mask)
    monkeypatch.setitem(MASKS, mask, wrong)
    assert error(attention_by_tiles("aten", tensors, tiles_of(mask)), want) > 1e-3


def test_rows_without_keys_are_left_alone():
    q, k, v, _ = inputs(torch.float32)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    attend_tiles_(
        out,
        lse,
        q,
        Keys(k, v),
        tiles_of("causal")[:0],
        SCALE,
        select_backend("aten", "cpu", q.dtype),
    )
    assert torch.isneginf(lse).all()
    assert not out.any()
