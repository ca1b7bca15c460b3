"""Errors of the Triton attention of lists of tiles against every pair in float64."""

from typing import NamedTuple
from unittest.mock import patch

import torch

from kernels.attention import add_gradients_, attend_tiles_, select_backend
from kernels.blocks import ANTI, CAUSAL, FULL, Keys, Rows, Tile, merge_
from parallel.context.layout import Stride
from parallel.context.tiles import pieces, tiles
from tests.kernels.blocks import block_backward, block_forward

NAMES = ("out", "lse", "dq", "dk", "dv")
SCALE = 0.2


def tile(q0, q1, k0, k1, kind):
    return Tile(slice(q0, q1), slice(k0, k1), kind)


def of_mask(tokens, reach, boundaries=()):
    """The tiles of a window (before, behind), within documents that end at these tokens."""
    tile_pieces = pieces([Stride(0, tokens)], 1, boundaries)
    return tiles(tile_pieces, tile_pieces, 1, reach)


class Case(NamedTuple):
    """Tiles of so many queries and keys; those of each call continue from the calls before."""

    calls: tuple[tuple[Tile, ...], ...]
    tokens: tuple[int, int]
    dtype: str = "float32"
    width: int = 64
    heads: tuple[int, int] = (1, 1)
    batch: int = 1


KINDS = (
    tile(0, 10, 3, 24, FULL),
    tile(10, 21, 5, 16, CAUSAL),
    tile(10, 21, 16, 27, ANTI),
    tile(2, 19, 28, 31, FULL),
)
PACKED = of_mask(31, (None, 0), (1, 4, 17, 19))
WINDOW = of_mask(37, (9, 0))
BOTH = of_mask(31, (6, 3), (20,))
CASES = {
    "kinds, some rows without keys": Case((KINDS[:2], KINDS[2:]), (23, 33), width=80, heads=(2, 1)),
    "causal, in bfloat16": Case(((tile(0, 33, 0, 33, CAUSAL),),), (33, 33), "bfloat16", batch=2),
    "anti, in float16": Case(((tile(1, 33, 0, 32, ANTI),),), (33, 33), "float16", width=20),
    "many documents": Case((PACKED,), (31, 31)),
    "window": Case((WINDOW[::2], WINDOW[1::2]), (37, 37)),
    "window on both sides and documents": Case((BOTH,), (31, 31), "bfloat16", width=80),
}


def inputs(case, device):
    """q, k, v and dout, slices of longer tensors."""
    generator = torch.Generator().manual_seed(3)
    sides = zip((0, 1, 1, 0), (0, 1, 1, 0), strict=True)
    shapes = [
        (case.batch, case.tokens[side] + 2, case.heads[kind], case.width) for side, kind in sides
    ]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(device, getattr(torch, case.dtype))[:, 2:] for x in drawn]


def folded(backend, tensors, calls, scale, accum_dtype=torch.float32):
    """The tensors in ``NAMES`` from q, k, v and dout.

    Tiles of each call continue from the calls before.
    """
    q, k, v, dout = tensors
    out = torch.zeros(q.shape, dtype=accum_dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=accum_dtype, device=q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=accum_dtype, device=q.device) for x in (q, k, v))
    for call in calls:
        attend_tiles_(out, lse, q, Keys(k, v), call, scale, backend)
    for call in calls:
        add_gradients_((dq, dk, dv), Rows(q, dout, out, lse), Keys(k, v), call, scale, backend)
    return [out, lse, dq, dk, dv]


def truth(case, device, kinds=lambda tile: tile.kind):
    """The same in float64 from all pairs; 0 and -inf in a row without keys."""
    *leaves, dout = (x.double() for x in inputs(case, device))
    q, k, v = leaves = [x.requires_grad_() for x in leaves]
    visible_pairs = torch.zeros(case.tokens, dtype=torch.bool, device=device)
    for part in (tile for call in case.calls for tile in call):
        all_pairs = torch.ones(
            part.q.stop - part.q.start, part.k.stop - part.k.start, device=device
        ).bool()
        visible_pairs[part.q, part.k] |= {
            FULL: all_pairs,
            CAUSAL: all_pairs.tril(),
            ANTI: all_pairs.triu(),
        }[kinds(part)]
    k, v = (x.repeat_interleave(case.heads[0] // case.heads[1], 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bths", q, k) * SCALE
    scores = scores.masked_fill(~visible_pairs[:, None], -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~visible_pairs.any(1)[:, None, None], 0)
    out = torch.einsum("bths,bshd->bthd", weights, v)
    return [out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, leaves, dout)]


def error(got, want):
    """The largest difference, relative to the largest value or 1.

    It is infinite where one has keys and the other none.
    """
    if not torch.equal(torch.isneginf(got), torch.isneginf(want)):
        return torch.inf
    got, want = (x.double().masked_fill(torch.isneginf(x), 0) for x in (got, want))
    return ((got - want).abs().max() / want.abs().max().clamp(min=1)).item()


def errors(case, device="cpu"):
    """Each result's."""
    tensors = inputs(case, device)
    results = folded(select_backend("triton", device, tensors[0].dtype), tensors, case.calls, SCALE)
    return {
        name: error(*pair)
        for name, pair in zip(NAMES, zip(results, truth(case, device), strict=True), strict=True)
    }


def block_error(kind, device="cpu"):
    """The largest of a block alone, which continues from nothing."""
    case = Case(((tile(0, 35, 0, 35, kind),),), (35, 35))
    q, k, v, dout = inputs(case, device)
    backend = select_backend("triton", device, q.dtype)
    out, lse = block_forward(q, k, v, kind, SCALE, backend)
    results = out, lse, *block_backward(Rows(q, dout, out, lse), Keys(k, v), kind, SCALE, backend)
    return max(error(*pair) for pair in zip(results, truth(case, device), strict=True))


def merge_error(device="cpu"):
    """The largest difference of the merge in one launch from its twin.

    It merges into a slice, with some rows without keys.
    """
    from kernels.triton import pointwise

    generator = torch.Generator().manual_seed(4)
    out, part = (torch.randn(2, 20, 3, 80, generator=generator).to(device) for _ in range(2))
    lse, part_lse = (torch.randn(2, 20, 3, generator=generator).to(device) * 9 for _ in range(2))
    lse[:, ::3], out[:, ::3] = -torch.inf, 0
    rows, part = slice(1, 18), part.bfloat16()[:, :17]
    want = out.double(), lse.double()
    merge_(want[0][:, rows], want[1][:, rows], part.double(), part_lse[:, :17].double())
    pointwise.merge_(out[:, rows], lse[:, rows], part, part_lse[:, :17])
    return max(error(a, b) for a, b in zip((out, lse), want, strict=True))


def report():
    """Return the errors, with blocks of 16 tokens, and that of a band that is a token too wide."""
    from kernels.triton import flash_attention as tiled
    from kernels.triton import work

    small = {256: tiled.AttentionBlocking(16, 16, 4, 1)}
    with (
        patch.object(tiled, "EXACT", small[256]),
        patch.object(tiled, "BLOCKINGS", dict.fromkeys(tiled.BLOCKINGS, small)),
    ):
        summary = {"errors": {name: errors(case) for name, case in CASES.items()}}
        summary |= {"block": block_error(ANTI), "merge": merge_error()}
        exact = work._band
        with patch.object(work, "_band", lambda *args: (*(band := exact(*args))[:5], band[5] + 1)):
            work.work_of.cache_clear()
            summary["fault"] = errors(CASES["many documents"])
    return summary
