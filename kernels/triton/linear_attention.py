"""Linear attention's scan as a fused Triton kernel, forward and backward.

One program runs one head of one segment and a block of its value channels through the segment's
chunks, and keeps the state of these channels in float32 registers: one pass computes the scores
within a chunk, reads the state and updates it. A segment is a document, or some consecutive chunks
of one, if there are too few documents to fill a GPU. Such segments run at once, in three launches,
as in lightning attention (Qin et al. 2024) and flash-linear-attention's simple GLA, which save a
state per chunk:

1. ``scan_kernel`` computes what each segment adds to the state,
2. ``carry_kernel`` goes through these states in order,
3. ``scan_kernel`` computes the outputs from each segment's start.

The backward pass is three scans of other tensors (``kernels.linear_attention``).

Shapes: B sequences, T tokens, H heads, D width of queries and keys, E width of values, C tokens per
chunk, S segments, N of which have a state of their own. Names: ``b_`` is a block in registers.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import interpreted
from kernels.triton.work import dot, rounded
from runtime.tensors import cached_on_device, constants, to_device

SIZE = 512
"""Number of state elements that one program of ``carry_kernel`` holds."""
MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200.

Every GPU cuts a scan as if it had this number, so that all GPUs round alike. A multiprocessor has
registers for one program.
"""
PROGRAMS = 4 * MULTIPROCESSORS
"""Maximum number of programs into which a scan is cut: a few waves of about equal size."""


@triton.jit
def segment_of(bounds, row, segments, carried, REVERSE: tl.constexpr, EACH: tl.constexpr):
    """Find the segment of this program.

    Returns:
        Its first token, its length, the index of its state, and whether a state enters and leaves.
    """
    segment = tl.program_id(0) % segments
    if EACH:
        slot = tl.load(bounds + segments + 1 + segment)
        state_index = row * carried + slot
        enters = slot >= 0
        leaves = enters
    elif REVERSE:
        state_index = row
        enters = segment == segments - 1
        leaves = segment == 0
    else:
        state_index = row
        enters = segment == 0
        leaves = segment == segments - 1
    first = tl.load(bounds + segment)
    return first, tl.load(bounds + segment + 1) - first, state_index, enters, leaves


@triton.jit
def rows_of(base, stride, token, channel, filled, width):
    """Load these channels of the given tokens of one head; zero in empty slots."""
    return tl.load(
        base + token[:, None] * stride + channel[None, :],
        filled[:, None] & (channel < width)[None, :],
        0.0,
    )


@triton.jit(do_not_specialize=["segments", "carried"])  # the values differ in each batch
def scan_kernel(
    q,  # [B, T, H, D]
    k,  # [B, T, H, D]
    v,  # [B, T, H, E]
    out,  # [B, T, H, E], contiguous
    state,  # [B, H, D, E], or with EACH [B, H, N, D, E]
    final,  # like state, contiguous
    rates,  # [H]
    bounds,  # [2, S + 1], see Segments
    strides,  # of batch, token and head of q, k and v, and of row and column of the state
    H,
    D,
    E,
    segments,
    carried,  # N
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_STATE: tl.constexpr,
    OUTPUT: tl.constexpr,
    EACH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Scan as in ``kernels.linear_scan.scan``; channels have stride 1.

    With ``EACH``, segments have states of their own (``segments_of``): without ``OUTPUT`` the state
    is the segment's contribution, with ``OUTPUT`` the state with which the segment starts. Without
    ``EACH``, segments are documents: a state enters the first and leaves the last.
    """
    row = (tl.program_id(0) // segments).to(tl.int64)  # row of B * H
    batch = row // H
    head = row % H
    first, length, state_index, enters, leaves = segment_of(
        bounds, row, segments, carried, REVERSE, EACH
    )
    rate = tl.load(rates + head)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    c = tl.arange(0, C)
    inside = (d < D)[:, None] & (e < E)[None, :]
    b_state = tl.zeros((BLOCK_D, BLOCK_E), dtype=tl.float32)
    if HAS_STATE:
        # Forwards, the state enters the first document; backwards, its gradient enters the last.
        states = state + state_index * D * E + d[:, None] * strides[9] + e[None, :] * strides[10]
        b_state = tl.load(states, mask=inside & enters, other=0.0).to(tl.float32)

    if REVERSE:
        distance = c[None, :] - c[:, None]
    else:
        distance = c[:, None] - c[None, :]
    decay = tl.where(
        distance >= 0, tl.exp(rate * tl.maximum(distance, 0).to(tl.float32)), 0.0
    )  # [C, C]
    head_q = q + batch * strides[0] + head * strides[2]
    head_k = k + batch * strides[3] + head * strides[5]
    head_v = v + batch * strides[6] + head * strides[8]
    chunks = tl.cdiv(length, C)
    if EACH and not OUTPUT:
        chunks = tl.where(leaves, chunks, 0)
    for n in range(chunks):
        if REVERSE:
            start = (chunks - 1 - n) * C
        else:
            start = n * C
        count = tl.minimum(C, length - start)
        token = (first + start + c).to(tl.int64)
        filled = c < count
        before = (c + 1).to(tl.float32)
        after = tl.maximum(count - 1 - c, 0).to(tl.float32)
        if REVERSE:
            read_distance = after
            write_distance = before
        else:
            read_distance = before
            write_distance = after
        b_k = rows_of(head_k, strides[4], token, d, filled, D)
        b_v = rows_of(head_v, strides[7], token, e, filled, E)
        if OUTPUT:
            b_q = rows_of(head_q, strides[1], token, d, filled, D)
            scores = dot(b_q, tl.trans(b_k), PRECISION, WIDEN) * decay
            b_out = dot(b_q, rounded(b_state, b_q.dtype, WIDEN), PRECISION, WIDEN)
            b_out *= tl.exp(rate * read_distance)[:, None]
            b_out += dot(rounded(scores, b_v.dtype, WIDEN), b_v, PRECISION, WIDEN)
            tokens = tl.load(bounds + segments)  # T
            outputs = out + ((batch * tokens + token[:, None]) * H + head) * E + e[None, :]
            written = filled[:, None] & (e < E)[None, :]
            tl.store(outputs, rounded(b_out, out.dtype.element_ty, WIDEN), mask=written)
        weights = tl.exp(rate * write_distance)
        weighted_k = rounded(b_k * weights[:, None], b_k.dtype, WIDEN)
        b_state *= tl.exp(rate * count.to(tl.float32))
        b_state += dot(tl.trans(weighted_k), b_v, PRECISION, WIDEN)

    if not (EACH and OUTPUT):
        stored = inside & leaves
        finals = final + state_index * D * E + d[:, None] * E + e[None, :]
        tl.store(finals, b_state, mask=stored)


@triton.jit(do_not_specialize=["carried"])
def carry_kernel(
    states,  # [B, H, N, D, E], updated
    state,  # [B, H, D, E]
    final,  # [B, H, D, E], contiguous
    rates,  # [H]
    steps,  # [2, N + 1], see Segments
    state_row,  # stride of D of the state
    state_column,  # stride of E
    H,
    E,
    numbers,  # D * E
    carried,  # N
    REVERSE: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Replace what each segment adds to the state by the state with which the segment starts.

    ``final`` is the state after the last segment.
    """
    row = tl.program_id(0).to(tl.int64)  # row of B * H
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)  # element of D * E
    inside = i < numbers
    rate = tl.load(rates + row % H)
    b_state = tl.zeros((SIZE,), dtype=tl.float32)
    if HAS_STATE:
        entering = state + row * numbers + i // E * state_row + i % E * state_column
        b_state = tl.load(entering, mask=inside, other=0.0).to(tl.float32)
    for n in range(carried):
        step = carried - 1 - n if REVERSE else n
        length = tl.load(steps + step).to(tl.float32)
        starts_document = steps + carried + 1 + step
        if REVERSE:
            starts_document += 1  # of the next segment, since the scan comes from there
        resets = tl.load(starts_document)
        b_state = tl.where(resets != 0, 0.0, b_state)
        segment_state = states + (row * carried + step) * numbers + i
        added = tl.load(segment_state, mask=inside, other=0.0)
        tl.store(segment_state, b_state, mask=inside)
        b_state = b_state * tl.exp(rate * length) + added
    tl.store(final + row * numbers + i, b_state, mask=inside)


def parts_of(programs: int) -> int:
    """Return the number of segments per sequence, given the number of programs of an uncut scan.

    The number is 1 if these programs keep four out of five multiprocessors busy, since cutting
    costs about a fifth more operations.
    """
    slots = MULTIPROCESSORS * -(-programs // MULTIPROCESSORS)
    if 5 * programs >= 4 * slots:
        return 1
    return max(1, PROGRAMS // programs)


class Segments(NamedTuple):
    """Tables of S segments, of which N have a state ``[B, H, N, D, E]``.

    A segment has a state if its document is cut, or if it is in the first or the last document.
    """

    bounds: Tensor
    """int32 ``[2, S + 1]``. Row 0: the segments' cumulative lengths. Row 1: the index of each
    segment's state, or -1 if it has none."""
    steps: Tensor
    """int32 ``[2, N + 1]``, of the segments with a state. Row 0: their lengths. Row 1: 1 if the
    segment starts a document other than the first, which resets the state, else 0.
    """


@cached_on_device(64)  # packed documents differ from batch to batch; all layers share a step's
def segments_of(
    cu_seqlens: tuple[int, ...], min_segments: int, chunk: int, device: torch.device
) -> Segments:
    """Cut documents into at least ``min_segments`` segments of whole chunks, if there are enough.

    At most N = 2 * (min_segments + 1) of them have a state.
    """
    chunks = [-(-(end - first) // chunk) for first, end in pairwise(cu_seqlens)]
    total_chunks = sum(chunks)
    bounds: list[int] = []
    slots: list[int] = []
    lengths: list[int] = []
    starts_document: list[int] = []
    for (first, end), count in zip(pairwise(cu_seqlens), chunks, strict=True):
        parts = min(count, -(-count * min_segments // total_chunks))
        has_state = parts > 1 or first == 0 or end == cu_seqlens[-1]
        cuts = [first + part * count // parts * chunk for part in range(parts)]
        for start, stop in pairwise([*cuts, end]):
            bounds.append(start)
            slots.append(len(lengths) if has_state else -1)
            if has_state:
                lengths.append(stop - start)
                starts_document.append(int(start == first > 0))

    bounds_table = torch.tensor([[*bounds, cu_seqlens[-1]], [*slots, -1]], dtype=torch.int32)
    steps_table = torch.tensor([[*lengths, 0], [*starts_document, 0]], dtype=torch.int32)
    return Segments(to_device(bounds_table, device), to_device(steps_table, device))


class ScanBlocking(NamedTuple):
    """Block sizes of a program, and its launch options."""

    C: int
    BLOCK_D: int
    BLOCK_E: int
    num_warps: int
    num_stages: int


def blocking_of(width: int, value_width: int, dtype: torch.dtype) -> ScanBlocking:
    """Return block sizes whose state fits into registers.

    Compiled for sm_80 and sm_90, bfloat16 spills at most 32 bytes up to a width of 256. float32,
    for tests and small exact runs, spills from a width of 128 on.
    """
    exact = dtype == torch.float32
    rows = max(16, triton.next_power_of_2(width))
    columns = 64 if rows <= 64 and not exact else 32
    columns = min(columns, max(16, triton.next_power_of_2(value_width)))
    chunk = 32 if rows > 128 or exact else 64
    return ScanBlocking(chunk, rows, columns, num_warps=8, num_stages=2)


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    *,
    reverse: bool = False,
    accum_out: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scan the tokens as ``kernels.linear_scan.scan`` does."""
    batch, length, heads, width = k.shape
    value_width = v.shape[-1]
    if k.stride(-1) != 1:
        k = k.contiguous()
    if v.stride(-1) != 1:
        v = v.contiguous()
    if q is not None and q.stride(-1) != 1:
        q = q.contiguous()
    out_shape = (0,) if q is None else (batch, length, heads, value_width)
    out = v.new_empty(out_shape, dtype=torch.float32 if accum_out else v.dtype)
    final = torch.empty(batch, heads, width, value_width, dtype=torch.float32, device=k.device)
    state_strides = (value_width, 1)
    if state is not None:
        if state.transpose(-1, -2).is_contiguous():
            state_strides = (1, width)
        else:
            state = state.contiguous()

    blocking = blocking_of(width, value_width, k.dtype)
    blocks = triton.cdiv(value_width, blocking.BLOCK_E)
    cu_seqlens = tuple(cu_seqlens or (0, length))
    min_segments = parts_of(batch * heads * blocks)
    bounds, steps = segments_of(cu_seqlens, min_segments, blocking.C, k.device)
    segments = bounds.shape[1] - 1
    carried = steps.shape[1] - 1
    rates = constants(tuple(log_decay), torch.float32, k.device)

    def launch(
        q: Tensor | None, state: Tensor | None, final: Tensor, strides: tuple[int, int], each: bool
    ) -> None:
        tensors = (k if q is None else q, k, v)  # k stands in for a q of None, which is not read
        all_strides = (*(stride for x in tensors for stride in x.stride()[:3]), *strides)
        scan_kernel[batch * heads * segments, blocks](
            *tensors, out, k if state is None else state, final, rates, bounds, all_strides,
            heads, width, value_width, segments, carried,
            REVERSE=reverse, HAS_STATE=state is not None, OUTPUT=q is not None, EACH=each,
            PRECISION="ieee", WIDEN=interpreted(), **blocking._asdict(),
        )  # fmt: skip

    if segments == len(cu_seqlens) - 1:
        launch(q, state, final, state_strides, each=False)
        return out, final

    states_shape = (batch, heads, carried, width, value_width)
    states = torch.empty(states_shape, dtype=torch.float32, device=k.device)
    launch(None, None, states, (value_width, 1), each=True)
    numbers = width * value_width
    grid: Any = (batch * heads, triton.cdiv(numbers, SIZE))
    carry_kernel[grid](
        states, states if state is None else state, final, rates, steps, *state_strides,
        heads, value_width, numbers, carried,
        REVERSE=reverse, HAS_STATE=state is not None, SIZE=SIZE,
    )  # fmt: skip
    if q is not None:
        launch(q, states, states, (value_width, 1), each=True)
    return out, final
