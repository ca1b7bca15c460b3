"""Triton kernels of softmax attention of a list of tiles, forward and backward.

A program has a block of rows (of columns in the last kernel) of one head, and goes through all
tiles that touch it (``kernels.triton.work``). In each tile the steps in the middle see every pair
and need no mask; they come first, then the steps before and after them, with a mask. So the inner
loop, which has most of the work, has no comparisons.

The forward pass is a running softmax (Rabe and Staats 2021; Dao 2023, FlashAttention-2): ``peak``
is the largest score so far, ``weight`` the sum of exp(score - peak) and ``total`` the sum of values
with these weights. It continues from running results in float32: out is a ``total``, and lse a
``peak`` with a ``weight`` of 1. Exponentials are powers of two, which a GPU computes directly.

The backward pass has two kernels, one over rows for dq and one over columns for dk and dv, so that
each program owns the numbers that it adds to. Nothing depends on the order in which programs run.

Names: ``b_`` is a block in registers, as ``b_q`` of the tensor q. D is the width of a head and
WIDTH the next power of two, ROWS and COLUMNS the sides of a block of scores. ``strides`` has the
strides of batch, token and head of q, k, v and dout; ``group`` is the number of query heads per
key/value head.
"""

import triton
import triton.language as tl

from kernels.triton.work import dot, rounded

LOG2E = tl.constexpr(1.4426950408889634)
VARYING = ["T", "S", "H", "group"]  # do not recompile a kernel for new values of these arguments


@triton.jit
def span(entry, start, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Find the tokens on a tile's other side that a block of SIZE tokens from ``start`` sees.

    Returns:
        The tile's bounds (first, last + 1) on this side, its band (low, high), the other side's
        tokens ``other_first`` to ``other_stop``, and three numbers of steps of STEP tokens: all
        steps, those before the first step without a mask, and those up to the last one without.
    """
    first = tl.load(entry)
    stop = tl.load(entry + 1)
    low = tl.load(entry + 4)
    high = tl.load(entry + 5)
    x0 = tl.maximum(start, first)
    x1 = tl.minimum(start + SIZE, stop) - 1
    other_first = tl.maximum(tl.load(entry + 2), x0 + low)
    other_stop = tl.minimum(tl.load(entry + 3), x1 + high + 1)
    steps = tl.cdiv(other_stop - other_first, STEP)
    head = tl.minimum(tl.cdiv(tl.maximum(x1 + low - other_first, 0), STEP), steps)
    full_stop = tl.minimum(other_stop, x0 + high + 1)  # end of the tokens that the first row sees
    tail = tl.maximum(tl.maximum(full_stop - other_first, 0) // STEP, head)
    tail = tl.where((start >= first) & (start + SIZE <= stop), tail, head)
    return first, stop, low, high, other_first, other_stop, steps, head, tail


@triton.jit
def visible(x, y, first, stop, low, high, other_stop):
    """Return a mask ``[x, y]`` of the pairs in a tile; no y is below ``other_first``."""
    distance = y[None, :] - x[:, None]
    in_rows = ((x >= first) & (x < stop))[:, None]
    return in_rows & (y < other_stop)[None, :] & (distance >= low) & (distance <= high)


@triton.jit
def pointers_of(base, stride, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to the channels of ROWS tokens of one head.

    Offsets inside a block fit 32 bits, and do not change in a loop.
    """
    i = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    return base + first.to(tl.int64) * stride + ((i * stride)[:, None] + d[None, :])


@triton.jit
def rows_of(
    base,
    stride,
    first,
    stop,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load a [ROWS, WIDTH] block of one head, starting at token ``first``.

    Channels from D on are zero; with MASKED, so are tokens from ``stop`` on.
    """
    i = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    pointers = pointers_of(base, stride, first, ROWS, WIDTH)
    if MASKED:
        block = tl.load(pointers, mask=(first + i < stop)[:, None] & (d < D)[None, :], other=0.0)
    elif D < WIDTH:
        block = tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q,  # [B, T, H, D]
    k,  # [B, S, K, D]
    v,  # [B, S, K, D]
    out,  # [B, T, H, D], updated
    lse,  # [B, T, H], updated
    blocks,
    entries,
    scale,
    strides,
    T,
    H,
    group,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Merge the attention of all tiles that touch a block of rows into out and lse."""
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    begin = tl.load(blocks + 4 * tl.program_id(0)) * ROWS
    x = begin + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    lse += batch * T * H + head
    out = pointers_of(out + (batch * T * H + head) * D, H * D, begin, ROWS, WIDTH)
    b_q = rows_of(
        q + batch * strides[0] + head * strides[2], strides[1], begin, T, D, ROWS, WIDTH, True
    )
    k += batch * strides[3] + head // group * strides[5]
    v += batch * strides[6] + head // group * strides[8]
    scale *= LOG2E

    # Load the results so far.
    before = tl.load(lse + x * H, mask=x < T, other=-float("inf")) * LOG2E
    has_keys = before > -float("inf")
    total = tl.load(out, mask=has_keys[:, None] & (d < D)[None, :], other=0.0)
    weight = tl.where(has_keys, 1.0, 0.0)
    peak = before
    start_weight = weight

    for entry in range(
        tl.load(blocks + 4 * tl.program_id(0) + 1), tl.load(blocks + 4 * tl.program_id(0) + 2)
    ):
        first, stop, low, high, other_first, other_stop, steps, ahead, tail = span(
            entries + 6 * entry, begin, ROWS, COLUMNS
        )
        for MASKED in tl.static_range(2):
            for step in range(steps - tail + ahead if MASKED else tail - ahead):
                if MASKED:
                    index = tl.where(step < ahead, step, step - ahead + tail)
                else:
                    index = ahead + step
                start = other_first + index * COLUMNS
                b_k = rows_of(k, strides[4], start, other_stop, D, COLUMNS, WIDTH, MASKED)
                scores = dot(b_q, tl.trans(b_k), "ieee", WIDEN)
                if MASKED:
                    y = start + tl.arange(0, COLUMNS)
                    pairs = visible(x, y, first, stop, low, high, other_stop)
                    scores = tl.where(pairs, scores, -float("inf"))
                top = tl.maximum(peak, tl.max(scores, 1) * scale)
                if MASKED:
                    base = tl.where(top > -float("inf"), top, 0.0)  # no key so far: avoid inf - inf
                else:
                    base = top
                scores = tl.exp2(scores * scale - base[:, None])
                rescale = tl.exp2(peak - base)
                weight = weight * rescale + tl.sum(scores, 1)
                b_v = rows_of(v, strides[7], start, other_stop, D, COLUMNS, WIDTH, MASKED)
                total = total * rescale[:, None]
                total += dot(rounded(scores, b_v.dtype, WIDEN), b_v, "ieee", WIDEN)
                peak = top

    # Rows that no tile touches are not written, so they keep their bits.
    changed = (x < T) & ((peak != before) | (weight != start_weight))
    tl.store(lse + x * H, (peak + tl.log2(weight)) / LOG2E, mask=changed)
    total = rounded(total / weight[:, None], out.dtype.element_ty, WIDEN)
    tl.store(out, total, mask=changed[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=VARYING)
def rows_kernel(
    q,  # [B, T, H, D]
    k,  # [B, S, K, D]
    v,  # [B, S, K, D]
    dout,  # [B, T, H, D]
    out,  # [B, T, H, D]
    lse,  # [B, T, H]
    level,  # [B, H, T], written: lse in powers of 2
    delta,  # [B, H, T], written: rowsum(dout * out)
    dq,  # [B, T, H, D], added to
    blocks,
    entries,
    scale,
    strides,
    T,
    H,
    group,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add to dq; write level and delta of the rows that a tile touches, for ``columns_kernel``."""
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    begin = tl.load(blocks + 4 * tl.program_id(0)) * ROWS
    x = begin + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    inside = (x < T)[:, None] & (d < D)[None, :]
    head_offset = batch * T * H + head
    b_q = rows_of(
        q + batch * strides[0] + head * strides[2], strides[1], begin, T, D, ROWS, WIDTH, True
    )
    b_dout = rows_of(
        dout + batch * strides[9] + head * strides[11], strides[10], begin, T, D, ROWS, WIDTH, True
    )
    b_out = rows_of(out + head_offset * D, H * D, begin, T, D, ROWS, WIDTH, True).to(tl.float32)
    b_delta = tl.sum(b_out * b_dout.to(tl.float32), 1)
    b_level = tl.load(lse + head_offset + x * H, mask=x < T, other=0.0) * LOG2E
    row = (batch * H + head) * T + x
    tl.store(level + row, b_level, mask=x < T)
    tl.store(delta + row, b_delta, mask=x < T)

    k += batch * strides[3] + head // group * strides[5]
    v += batch * strides[6] + head // group * strides[8]
    b_dq = tl.zeros((ROWS, WIDTH), tl.float32)
    for entry in range(
        tl.load(blocks + 4 * tl.program_id(0) + 1), tl.load(blocks + 4 * tl.program_id(0) + 2)
    ):
        first, stop, low, high, other_first, other_stop, steps, ahead, tail = span(
            entries + 6 * entry, begin, ROWS, COLUMNS
        )
        for MASKED in tl.static_range(2):
            for step in range(steps - tail + ahead if MASKED else tail - ahead):
                if MASKED:
                    index = tl.where(step < ahead, step, step - ahead + tail)
                else:
                    index = ahead + step
                start = other_first + index * COLUMNS
                b_k = rows_of(k, strides[4], start, other_stop, D, COLUMNS, WIDTH, MASKED)
                b_v = rows_of(v, strides[7], start, other_stop, D, COLUMNS, WIDTH, MASKED)
                scores = dot(b_q, tl.trans(b_k), "ieee", WIDEN)
                scores = tl.exp2(scores * (scale * LOG2E) - b_level[:, None])
                if MASKED:
                    y = start + tl.arange(0, COLUMNS)
                    pairs = visible(x, y, first, stop, low, high, other_stop)
                    scores = tl.where(pairs, scores, 0.0)
                scores *= dot(b_dout, tl.trans(b_v), "ieee", WIDEN) - b_delta[:, None]
                b_dq += dot(rounded(scores, b_k.dtype, WIDEN), b_k, "ieee", WIDEN)
    b_dq *= scale
    dq = pointers_of(dq + head_offset * D, H * D, begin, ROWS, WIDTH)
    b_dq += tl.load(dq, mask=inside, other=0.0)
    tl.store(dq, rounded(b_dq, dq.dtype.element_ty, WIDEN), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def columns_kernel(
    q,  # [B, T, H, D]
    k,  # [B, S, K, D]
    v,  # [B, S, K, D]
    dout,  # [B, T, H, D]
    level,  # [B, H, T]
    delta,  # [B, H, T]
    dk,  # [B, S, K, D], added to
    dv,  # [B, S, K, D], added to
    blocks,
    entries,
    scale,
    strides,
    T,
    S,
    H,
    group,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add to dk and dv, for all query heads that share a key/value head, one after the other.

    Scores are ``[columns, rows]``.
    """
    K = H // group
    batch = (tl.program_id(1) // K).to(tl.int64)
    head = tl.program_id(1) % K
    begin = tl.load(blocks + 4 * tl.program_id(0)) * COLUMNS
    x = begin + tl.arange(0, COLUMNS)
    d = tl.arange(0, WIDTH)
    inside = (x < S)[:, None] & (d < D)[None, :]
    b_k = rows_of(
        k + batch * strides[3] + head * strides[5], strides[4], begin, S, D, COLUMNS, WIDTH, True
    )
    b_v = rows_of(
        v + batch * strides[6] + head * strides[8], strides[7], begin, S, D, COLUMNS, WIDTH, True
    )
    b_dk = tl.zeros((COLUMNS, WIDTH), tl.float32)
    b_dv = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for query_head in range(head * group, head * group + group):
        head_rows = (batch * H + query_head) * T
        head_q = q + batch * strides[0] + query_head * strides[2]
        head_dout = dout + batch * strides[9] + query_head * strides[11]
        for entry in range(
            tl.load(blocks + 4 * tl.program_id(0) + 1), tl.load(blocks + 4 * tl.program_id(0) + 2)
        ):
            first, stop, low, high, other_first, other_stop, steps, ahead, tail = span(
                entries + 6 * entry, begin, COLUMNS, ROWS
            )
            for MASKED in tl.static_range(2):
                for step in range(steps - tail + ahead if MASKED else tail - ahead):
                    if MASKED:
                        index = tl.where(step < ahead, step, step - ahead + tail)
                    else:
                        index = ahead + step
                    start = other_first + index * ROWS
                    y = start + tl.arange(0, ROWS)
                    b_q = rows_of(head_q, strides[1], start, other_stop, D, ROWS, WIDTH, MASKED)
                    b_dout = rows_of(
                        head_dout, strides[10], start, other_stop, D, ROWS, WIDTH, MASKED
                    )
                    row = head_rows + y
                    if MASKED:
                        b_level = tl.load(level + row, mask=y < other_stop, other=0.0)
                        b_delta = tl.load(delta + row, mask=y < other_stop, other=0.0)
                    else:
                        b_level = tl.load(level + row)
                        b_delta = tl.load(delta + row)
                    scores = dot(b_k, tl.trans(b_q), "ieee", WIDEN)
                    scores = tl.exp2(scores * (scale * LOG2E) - b_level[None, :])
                    if MASKED:
                        pairs = visible(x, y, first, stop, low, high, other_stop)
                        scores = tl.where(pairs, scores, 0.0)
                    b_dv += dot(rounded(scores, b_dout.dtype, WIDEN), b_dout, "ieee", WIDEN)
                    scores *= dot(b_v, tl.trans(b_dout), "ieee", WIDEN) - b_delta[None, :]
                    b_dk += dot(rounded(scores, b_q.dtype, WIDEN), b_q, "ieee", WIDEN)
    b_dk *= scale
    head_offset = (batch * S * K + head) * D
    dk = pointers_of(dk + head_offset, K * D, begin, COLUMNS, WIDTH)
    b_dk += tl.load(dk, mask=inside, other=0.0)
    tl.store(dk, rounded(b_dk, dk.dtype.element_ty, WIDEN), mask=inside)
    dv = pointers_of(dv + head_offset, K * D, begin, COLUMNS, WIDTH)
    b_dv += tl.load(dv, mask=inside, other=0.0)
    tl.store(dv, rounded(b_dv, dv.dtype.element_ty, WIDEN), mask=inside)
