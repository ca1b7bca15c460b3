"""Softmax attention of a list of tiles in one launch, with Triton: forward, and backward by rows
and by columns.

A program has a block of rows (in the last kernel of columns) of one head, and goes through all
tiles that touch it (``kernels.triton.work``); in each first through the steps that see every pair,
which need no mask, then through the others. Results continue from running ones in float32: a row's
out and log-sum-exp are an accumulator, its maximum and a sum of 1. Nothing depends on the order in
which programs run.

Rabe and Staats 2021 (running softmax); Dao 2023, FlashAttention-2 (the loops, and their split into
masked and not).

Shapes as in ``kernels.blocks``. D is up to 256; bfloat16, float16 or, slowly, float32. out, lse,
dq, dk and dv are contiguous, and of the others heads are: strides are of batch, token and head.
level and delta ``[B, H, T]``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows, Tile, as_numbers, in_one_piece
from kernels.triton import interpreted
from kernels.triton.work import dot, rounded, work_of
from runtime.errors import UserError

LOG2E = tl.constexpr(1.4426950408889634)
VARYING = ["T", "S", "H", "group"]  # compile no kernel anew for their values


@triton.jit
def span(entry, start, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Find the other side's tokens that a block of SIZE from ``start`` on sees in a tile.

    Returns:
        The tile's bounds (first, last + 1, low, high), the tokens ``lo`` to ``hi``, and how many
        steps of STEP they are: all, those before the ones without a mask, and those up to their
        end.
    """
    first, stop = tl.load(entry), tl.load(entry + 1)
    low, high = tl.load(entry + 4), tl.load(entry + 5)
    x0, x1 = tl.maximum(start, first), tl.minimum(start + SIZE, stop) - 1
    lo = tl.maximum(tl.load(entry + 2), x0 + low)
    hi = tl.minimum(tl.load(entry + 3), x1 + high + 1)
    steps = tl.cdiv(hi - lo, STEP)
    head = tl.minimum(tl.cdiv(tl.maximum(x1 + low - lo, 0), STEP), steps)
    tail = tl.maximum(tl.maximum(tl.minimum(hi, x0 + high + 1) - lo, 0) // STEP, head)
    tail = tl.where((start >= first) & (start + SIZE <= stop), tail, head)
    return first, stop, low, high, lo, hi, steps, head, tail


@triton.jit
def visible(x, y, first, stop, low, high, hi):
    """Tell which pairs of tokens a tile holds, ``[x, y]``; no y is below the span's ``lo``."""
    apart = y[None, :] - x[:, None]
    return (
        ((x >= first) & (x < stop))[:, None] & (y < hi)[None, :] & (apart >= low) & (apart <= high)
    )


@triton.jit
def places(at, stride, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Point at the channels of ROWS tokens of one head; the offsets inside a block fit 32 bits, and
    stay in a loop.
    """
    i, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    return at + first.to(tl.int64) * stride + ((i * stride)[:, None] + d[None, :])


@triton.jit
def rows_of(
    at,
    stride,
    first,
    stop,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load ROWS tokens of one head from ``first`` on, zero from ``stop`` and from channel D on."""
    i, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = places(at, stride, first, ROWS, WIDTH)
    if MASKED:
        found = tl.load(at, mask=(first + i < stop)[:, None] & (d < D)[None, :], other=0.0)
    elif D < WIDTH:
        found = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        found = tl.load(at)
    return found


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, out, lse, blocks, entries, scale, strides, T, H, group,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Fold the tiles into out and lse."""
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    begin = tl.load(blocks + 4 * tl.program_id(0)) * ROWS
    x, d = begin + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    lse += batch * T * H + head
    out = places(out + (batch * T * H + head) * D, H * D, begin, ROWS, WIDTH)
    queries = rows_of(
        q + batch * strides[0] + head * strides[2], strides[1], begin, T, D, ROWS, WIDTH, True
    )
    k += batch * strides[3] + head // group * strides[5]
    v += batch * strides[6] + head // group * strides[8]
    scale *= LOG2E
    before = tl.load(lse + x * H, mask=x < T, other=-float("inf")) * LOG2E
    known = before > -float("inf")
    total = tl.load(out, mask=known[:, None] & (d < D)[None, :], other=0.0)
    weight = tl.where(known, 1.0, 0.0)
    peak, start_weight = before, weight
    for entry in range(
        tl.load(blocks + 4 * tl.program_id(0) + 1), tl.load(blocks + 4 * tl.program_id(0) + 2)
    ):
        first, stop, low, high, lo, hi, steps, ahead, tail = span(
            entries + 6 * entry, begin, ROWS, COLUMNS
        )
        for MASKED in tl.static_range(2):
            for step in range(steps - tail + ahead if MASKED else tail - ahead):
                place = (
                    tl.where(step < ahead, step, step - ahead + tail) if MASKED else ahead + step
                )
                start = lo + place * COLUMNS
                keys = rows_of(k, strides[4], start, hi, D, COLUMNS, WIDTH, MASKED)
                scores = dot(queries, tl.trans(keys), "ieee", WIDEN)
                if MASKED:
                    pairs = visible(x, start + tl.arange(0, COLUMNS), first, stop, low, high, hi)
                    scores = tl.where(pairs, scores, -float("inf"))
                top = tl.maximum(peak, tl.max(scores, 1) * scale)
                base = (
                    tl.where(top > -float("inf"), top, 0.0) if MASKED else top
                )  # a row may see nothing so far
                scores = tl.exp2(scores * scale - base[:, None])
                less = tl.exp2(peak - base)
                weight = weight * less + tl.sum(scores, 1)
                values = rows_of(v, strides[7], start, hi, D, COLUMNS, WIDTH, MASKED)
                total = total * less[:, None]
                total += dot(rounded(scores, values.dtype, WIDEN), values, "ieee", WIDEN)
                peak = top
    # What no tile touched keeps its bits.
    changed = (x < T) & ((peak != before) | (weight != start_weight))
    tl.store(lse + x * H, (peak + tl.log2(weight)) / LOG2E, mask=changed)
    total = rounded(total / weight[:, None], out.dtype.element_ty, WIDEN)
    tl.store(out, total, mask=changed[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=VARYING)
def rows_kernel(
    q, k, v, dout, out, lse, level, delta, dq, blocks, entries, scale, strides, T, H, group,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add to dq; write lse in powers of 2, and delta = rowsum(dout * out), of the rows that a tile
    touches.
    """
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    begin = tl.load(blocks + 4 * tl.program_id(0)) * ROWS
    x, d = begin + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    held, own = (x < T)[:, None] & (d < D)[None, :], batch * T * H + head
    queries = rows_of(
        q + batch * strides[0] + head * strides[2], strides[1], begin, T, D, ROWS, WIDTH, True
    )
    douts = rows_of(
        dout + batch * strides[9] + head * strides[11], strides[10], begin, T, D, ROWS, WIDTH, True
    )
    outs = rows_of(out + own * D, H * D, begin, T, D, ROWS, WIDTH, True).to(tl.float32)
    change = tl.sum(outs * douts.to(tl.float32), 1)
    peak = tl.load(lse + own + x * H, mask=x < T, other=0.0) * LOG2E
    of_head = (batch * H + head) * T + x
    tl.store(level + of_head, peak, mask=x < T)
    tl.store(delta + of_head, change, mask=x < T)
    k += batch * strides[3] + head // group * strides[5]
    v += batch * strides[6] + head // group * strides[8]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for entry in range(
        tl.load(blocks + 4 * tl.program_id(0) + 1), tl.load(blocks + 4 * tl.program_id(0) + 2)
    ):
        first, stop, low, high, lo, hi, steps, ahead, tail = span(
            entries + 6 * entry, begin, ROWS, COLUMNS
        )
        for MASKED in tl.static_range(2):
            for step in range(steps - tail + ahead if MASKED else tail - ahead):
                place = (
                    tl.where(step < ahead, step, step - ahead + tail) if MASKED else ahead + step
                )
                start = lo + place * COLUMNS
                keys = rows_of(k, strides[4], start, hi, D, COLUMNS, WIDTH, MASKED)
                values = rows_of(v, strides[7], start, hi, D, COLUMNS, WIDTH, MASKED)
                scores = dot(queries, tl.trans(keys), "ieee", WIDEN)
                scores = tl.exp2(scores * (scale * LOG2E) - peak[:, None])
                if MASKED:
                    pairs = visible(x, start + tl.arange(0, COLUMNS), first, stop, low, high, hi)
                    scores = tl.where(pairs, scores, 0.0)
                scores *= dot(douts, tl.trans(values), "ieee", WIDEN) - change[:, None]
                total += dot(rounded(scores, keys.dtype, WIDEN), keys, "ieee", WIDEN)
    total *= scale
    dq = places(dq + own * D, H * D, begin, ROWS, WIDTH)
    total += tl.load(dq, mask=held, other=0.0)
    tl.store(dq, rounded(total, dq.dtype.element_ty, WIDEN), mask=held)


@triton.jit(do_not_specialize=VARYING)
def columns_kernel(
    q, k, v, dout, level, delta, dk, dv, blocks, entries, scale, strides, T, S, H, group,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv, of all query heads that share a head of keys in turn; scores are
    ``[columns, rows]``.
    """
    K = H // group
    batch, head = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    begin = tl.load(blocks + 4 * tl.program_id(0)) * COLUMNS
    x, d = begin + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    held = (x < S)[:, None] & (d < D)[None, :]
    keys = rows_of(
        k + batch * strides[3] + head * strides[5], strides[4], begin, S, D, COLUMNS, WIDTH, True
    )
    values = rows_of(
        v + batch * strides[6] + head * strides[8], strides[7], begin, S, D, COLUMNS, WIDTH, True
    )
    sum_k = tl.zeros((COLUMNS, WIDTH), tl.float32)
    sum_v = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for member in range(head * group, head * group + group):
        of_head = (batch * H + member) * T
        q_at, dout_at = (
            q + batch * strides[0] + member * strides[2],
            dout + batch * strides[9] + member * strides[11],
        )
        for entry in range(
            tl.load(blocks + 4 * tl.program_id(0) + 1), tl.load(blocks + 4 * tl.program_id(0) + 2)
        ):
            first, stop, low, high, lo, hi, steps, ahead, tail = span(
                entries + 6 * entry, begin, COLUMNS, ROWS
            )
            for MASKED in tl.static_range(2):
                for step in range(steps - tail + ahead if MASKED else tail - ahead):
                    place = (
                        tl.where(step < ahead, step, step - ahead + tail)
                        if MASKED
                        else ahead + step
                    )
                    start = lo + place * ROWS
                    y = start + tl.arange(0, ROWS)
                    queries = rows_of(q_at, strides[1], start, hi, D, ROWS, WIDTH, MASKED)
                    douts = rows_of(dout_at, strides[10], start, hi, D, ROWS, WIDTH, MASKED)
                    at = of_head + y
                    peak = (
                        tl.load(level + at, mask=y < hi, other=0.0)
                        if MASKED
                        else tl.load(level + at)
                    )
                    change = (
                        tl.load(delta + at, mask=y < hi, other=0.0)
                        if MASKED
                        else tl.load(delta + at)
                    )
                    scores = dot(keys, tl.trans(queries), "ieee", WIDEN)
                    scores = tl.exp2(scores * (scale * LOG2E) - peak[None, :])
                    if MASKED:
                        scores = tl.where(visible(x, y, first, stop, low, high, hi), scores, 0.0)
                    sum_v += dot(rounded(scores, douts.dtype, WIDEN), douts, "ieee", WIDEN)
                    scores *= dot(values, tl.trans(douts), "ieee", WIDEN) - change[None, :]
                    sum_k += dot(rounded(scores, queries.dtype, WIDEN), queries, "ieee", WIDEN)
    sum_k *= scale
    own = (batch * S * K + head) * D
    dk = places(dk + own, K * D, begin, COLUMNS, WIDTH)
    sum_k += tl.load(dk, mask=held, other=0.0)
    tl.store(dk, rounded(sum_k, dk.dtype.element_ty, WIDEN), mask=held)
    dv = places(dv + own, K * D, begin, COLUMNS, WIDTH)
    sum_v += tl.load(dv, mask=held, other=0.0)
    tl.store(dv, rounded(sum_v, dv.dtype.element_ty, WIDEN), mask=held)


class Blocking(NamedTuple):
    """Rows and columns of a step, and launch options."""

    ROWS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


EXACT = Blocking(16, 16, 4, 1)
"""In float32, without tensor cores; larger ones take minutes to compile."""
BLOCKINGS = {
    ("forward", 80): {
        64: Blocking(128, 64, 4, 3),
        128: Blocking(128, 64, 8, 2),
        256: Blocking(64, 64, 8, 2),
    },
    ("rows", 80): {
        64: Blocking(128, 64, 8, 2),
        128: Blocking(64, 64, 8, 2),
        256: Blocking(64, 32, 8, 2),
    },
    ("columns", 80): {
        64: Blocking(64, 128, 8, 2),
        128: Blocking(64, 64, 8, 2),
        256: Blocking(32, 64, 8, 2),
    },
    ("forward", 90): {
        64: Blocking(128, 128, 8, 3),
        128: Blocking(128, 128, 8, 2),
        256: Blocking(128, 64, 8, 2),
    },
    ("rows", 90): {
        64: Blocking(128, 64, 8, 3),
        128: Blocking(128, 64, 8, 2),
        256: Blocking(64, 64, 8, 2),
    },
    ("columns", 90): {
        64: Blocking(64, 128, 8, 2),
        128: Blocking(64, 128, 8, 2),
        256: Blocking(32, 64, 8, 2),
    },
}
"""By kernel and compute capability, from which on, and by width, up to which."""
SMALLER = (86, 89, 120, 121)
"""Capabilities of GPUs with 99 KiB of shared memory for a block: they take the sizes of 80, up to
width 128.
"""


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, 90 for 9.0; the interpreter has the smallest."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


def blocking_of(kernel: str, q: Tensor) -> Blocking:
    """Return sizes and options that fit the registers and the shared memory of q's device."""
    level = capability(q.device)
    most = 128 if level in SMALLER else 256
    if q.shape[-1] > most:
        raise UserError(
            f"attention_backend triton takes heads of up to {most} channels on this device, and these are "
            f"{q.shape[-1]}; use --attention-backend auto"
        )
    if q.dtype == torch.float32:
        return EXACT
    by_width = BLOCKINGS[kernel, 90 if level >= 90 and level not in SMALLER else 80]
    return by_width[next(width for width in by_width if q.shape[-1] <= width)]


def attend_(
    out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
) -> None:
    """Fold the attention of these tiles into running results, in place; ``out`` and ``lse`` are
    contiguous.
    """
    _check_contiguous(out, lse)
    if not tiles:
        return
    q, k, v = map(in_one_piece, (q, *keys))
    blocking = blocking_of("forward", q)
    blocks, entries = work_of(as_numbers(tiles), blocking.ROWS, True, q.device)
    grid = (len(blocks) // 4, q.shape[0] * q.shape[2])
    given = q, k, v, out, lse, blocks, entries, scale, _strides(q, k, v), q.shape[1]
    forward_kernel[grid](*given, **_shared(q, k), **blocking._asdict())


def add_gradients_(
    sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
) -> None:
    """Add the gradients through these tiles to (dq, dk, dv), in place; they are contiguous."""
    _check_contiguous(*sums)
    if not tiles:
        return
    numbers = as_numbers(tiles)
    q, dout, k, v = map(in_one_piece, (rows.q, rows.dout, *keys))
    out, lse = rows.out.contiguous(), rows.lse.contiguous()
    dq, dk, dv = sums
    level, delta = lse.new_empty(2, q.shape[0], q.shape[2], q.shape[1])
    shared, strides = _shared(q, k), _strides(q, k, v, dout)
    blocking = blocking_of("rows", q)
    blocks, entries = work_of(numbers, blocking.ROWS, True, q.device)
    grid = (len(blocks) // 4, q.shape[0] * q.shape[2])
    given: tuple[Any, ...] = (
        q,
        k,
        v,
        dout,
        out,
        lse,
        level,
        delta,
        dq,
        blocks,
        entries,
        scale,
        strides,
        q.shape[1],
    )
    rows_kernel[grid](*given, **shared, **blocking._asdict())
    blocking = blocking_of("columns", q)
    blocks, entries = work_of(numbers, blocking.COLUMNS, False, q.device)
    grid = (len(blocks) // 4, k.shape[0] * k.shape[2])
    given = (
        q,
        k,
        v,
        dout,
        level,
        delta,
        dk,
        dv,
        blocks,
        entries,
        scale,
        strides,
        q.shape[1],
        k.shape[1],
    )
    columns_kernel[grid](*given, **shared, **blocking._asdict())


def _shared(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the last arguments of every kernel."""
    width = q.shape[3]
    return {
        "H": q.shape[2],
        "group": q.shape[2] // k.shape[2],
        "D": width,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "WIDEN": interpreted(),
    }


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _check_contiguous(*totals: Tensor) -> None:
    for x in totals:
        if not x.is_contiguous():
            raise ValueError(
                f"attention_backend triton adds to contiguous tensors, and one has strides {x.stride()}"
            )
