"""Linear attention's scan as a fused Triton kernel: intra-chunk, inter-chunk and state update in
one pass.

One program runs one head of one segment and a block of its value channels through the segment's
chunks, and keeps the state of these channels in float32 registers. A segment is a document, or,
where these are too few to fill a GPU, some consecutive chunks of one. Such segments run at once, in
three launches, as in lightning attention (Qin et al. 2024) and flash-linear-attention's simple GLA,
which keep a state per chunk: the kernel computes what each segment adds to the state;
``carry_kernel`` goes through these states in order; the kernel computes the outputs from each
segment's start. Forward and backward share the kernels, see ``kernels.linear_attention``.

Shapes: B sequences, T tokens, H heads, D width of queries and keys, E width of values, C tokens per
chunk, S segments.
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
"""Numbers of a state that one program of ``carry_kernel`` holds."""
MULTIPROCESSORS = 132
"""An H100 or H200 has so many; all GPUs take this number, to round alike. One has registers for one
program.
"""
PROGRAMS = 4 * MULTIPROCESSORS
"""Programs to cut a scan into, at most: a few about equal waves of them."""


@triton.jit
def segment_of(bounds, row, segments, carried, REVERSE: tl.constexpr, EACH: tl.constexpr):
    """Find this program's segment: its first token, its length, its state's place, if one enters
    and if one leaves.
    """
    segment = tl.program_id(0) % segments
    if EACH:
        slot = tl.load(bounds + segments + 1 + segment)
        place = row * carried + slot
        enters = slot >= 0
        leaves = enters
    else:
        place = row
        enters = segment == (segments - 1 if REVERSE else 0)
        leaves = segment == (0 if REVERSE else segments - 1)
    first = tl.load(bounds + segment)
    return first, tl.load(bounds + segment + 1) - first, place, enters, leaves


@triton.jit
def rows_of(at, stride, token, channel, filled, width):
    """Load these channels of these tokens of one head, zero where there are none."""
    return tl.load(
        at + token[:, None] * stride + channel[None, :],
        filled[:, None] & (channel < width)[None, :],
        0.0,
    )


@triton.jit(do_not_specialize=["segments", "carried"])  # they differ from batch to batch
def scan_kernel(
    q, k, v, out, state, final, rates, bounds, strides, H, D, E, segments, carried,
    C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, REVERSE: tl.constexpr, HAS_STATE: tl.constexpr,
    OUTPUT: tl.constexpr, EACH: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scan as in ``kernels.linear_attention.scan``; out and final are contiguous, channels have
    stride 1.

    ``strides`` are of batch, token and head of q, k and v, and of row and column of the state. With
    ``EACH`` segments have states (``segments_of``): without outputs the one that each adds, with
    outputs the one that it starts with. Otherwise segments are documents, of which one takes and
    one leaves a state.
    """
    row = (tl.program_id(0) // segments).to(tl.int64)  # of B * H
    batch, head = row // H, row % H
    first, length, place, enters, leaves = segment_of(bounds, row, segments, carried, REVERSE, EACH)
    rate = tl.load(rates + head)
    d, e, c = (
        tl.arange(0, BLOCK_D),
        tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E),
        tl.arange(0, C),
    )
    held = (d < D)[:, None] & (e < E)[None, :]
    running = tl.zeros((BLOCK_D, BLOCK_E), dtype=tl.float32)
    if HAS_STATE:
        # Forwards the state enters the first document; backwards its gradient enters the last.
        states = state + place * D * E + d[:, None] * strides[9] + e[None, :] * strides[10]
        running = tl.load(states, mask=held & enters, other=0.0).to(tl.float32)

    distance = c[None, :] - c[:, None] if REVERSE else c[:, None] - c[None, :]
    decay = tl.where(
        distance >= 0, tl.exp(rate * tl.maximum(distance, 0).to(tl.float32)), 0.0
    )  # [C, C]
    queries_at, keys_at = (
        q + batch * strides[0] + head * strides[2],
        k + batch * strides[3] + head * strides[5],
    )
    values_at = v + batch * strides[6] + head * strides[8]
    chunks = tl.cdiv(length, C)
    if EACH and not OUTPUT:
        chunks = tl.where(leaves, chunks, 0)
    for n in range(chunks):
        start = (chunks - 1 - n if REVERSE else n) * C
        count = tl.minimum(C, length - start)
        token = (first + start + c).to(tl.int64)
        filled = c < count
        before = (c + 1).to(tl.float32)
        after = tl.maximum(count - 1 - c, 0).to(tl.float32)
        keys = rows_of(keys_at, strides[4], token, d, filled, D)
        values = rows_of(values_at, strides[7], token, e, filled, E)
        if OUTPUT:
            queries = rows_of(queries_at, strides[1], token, d, filled, D)
            scores = dot(queries, tl.trans(keys), PRECISION, WIDEN) * decay
            result = dot(queries, rounded(running, queries.dtype, WIDEN), PRECISION, WIDEN)
            result *= tl.exp(rate * (after if REVERSE else before))[:, None]
            result += dot(rounded(scores, values.dtype, WIDEN), values, PRECISION, WIDEN)
            outputs = (
                out
                + ((batch * tl.load(bounds + segments) + token[:, None]) * H + head) * E
                + e[None, :]
            )
            wanted = filled[:, None] & (e < E)[None, :]
            tl.store(outputs, rounded(result, out.dtype.element_ty, WIDEN), mask=wanted)
        weights = tl.exp(rate * (before if REVERSE else after))
        weighted = rounded(keys * weights[:, None], keys.dtype, WIDEN)
        running *= tl.exp(rate * count.to(tl.float32))
        running += dot(tl.trans(weighted), values, PRECISION, WIDEN)

    if not (EACH and OUTPUT):
        tl.store(final + place * D * E + d[:, None] * E + e[None, :], running, mask=held & leaves)


@triton.jit(do_not_specialize=["carried"])
def carry_kernel(
    states, state, final, rates, steps, state_row, state_column, H, E, numbers, carried,
    REVERSE: tl.constexpr, HAS_STATE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds to the state by the state that it starts with, and give that
    after the last.
    """
    row = tl.program_id(0).to(tl.int64)  # of B * H
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)  # of D * E
    held = i < numbers
    rate = tl.load(rates + row % H)
    running = tl.zeros((SIZE,), dtype=tl.float32)
    if HAS_STATE:
        entering = state + row * numbers + i // E * state_row + i % E * state_column
        running = tl.load(entering, mask=held, other=0.0).to(tl.float32)
    for n in range(carried):
        step = carried - 1 - n if REVERSE else n
        length = tl.load(steps + step).to(tl.float32)
        meet = tl.load(steps + carried + 1 + step + (1 if REVERSE else 0))
        running = tl.where(meet != 0, 0.0, running)
        here = states + (row * carried + step) * numbers + i
        added = tl.load(here, mask=held, other=0.0)
        tl.store(here, running, mask=held)
        running = running * tl.exp(rate * length) + added
    tl.store(final + row * numbers + i, running, mask=held)


def parts_of(programs: int) -> int:
    """Return how many segments to cut a sequence into whose scan in one piece would be so many
    programs.

    1 if these keep four of five multiprocessors busy: to cut costs about a fifth more operations.
    """
    places = MULTIPROCESSORS * -(-programs // MULTIPROCESSORS)
    return 1 if 5 * programs >= 4 * places else max(1, PROGRAMS // programs)


class Segments(NamedTuple):
    """S segments, of which N have a state ``[B, H, N, D, E]``: those of documents in several, of
    the first and last.
    """

    bounds: Tensor
    """int32 ``[2, S + 1]``: their cumulative lengths; the places of their states, or -1."""
    steps: Tensor
    """int32 ``[2, N + 1]``, of those with a state: their lengths; 1 where a document starts."""


@cached_on_device(
    64
)  # packed documents differ from batch to batch; all layers of a step ask for the same
def segments_of(
    documents: tuple[int, ...], wanted: int, chunk: int, device: torch.device
) -> Segments:
    """Cut documents into at least ``wanted`` segments of whole chunks, if they have as many; N <= 2
    * (wanted + 1).
    """
    chunks = [-(-(end - first) // chunk) for first, end in pairwise(documents)]
    bounds, places, lengths, starts = list[int](), list[int](), list[int](), list[int]()
    for (first, end), count in zip(pairwise(documents), chunks, strict=True):
        parts = min(count, -(-count * wanted // sum(chunks)))
        keeps = parts > 1 or first == 0 or end == documents[-1]
        cuts = [first + part * count // parts * chunk for part in range(parts)]
        for start, stop in pairwise([*cuts, end]):
            bounds.append(start)
            places.append(len(lengths) if keeps else -1)
            if keeps:
                lengths.append(stop - start)
                starts.append(int(start == first > 0))
    tables = [[*bounds, documents[-1]], [*places, -1]], [[*lengths, 0], [*starts, 0]]
    return Segments(
        *(to_device(torch.tensor(table, dtype=torch.int32), device) for table in tables)
    )


class Blocking(NamedTuple):
    """Block sizes of one program, and its launch options."""

    C: int
    BLOCK_D: int
    BLOCK_E: int
    num_warps: int
    num_stages: int


def blocking_of(width: int, value_width: int, dtype: torch.dtype) -> Blocking:
    """Return sizes whose state fits the registers: compiled for sm_80 and sm_90, bfloat16 spills <=
    32 bytes to D 256.

    float32, for tests and small exact runs, spills from a width of 128 on.
    """
    rows = max(16, triton.next_power_of_2(width))
    columns = 64 if rows <= 64 and dtype != torch.float32 else 32
    columns = min(columns, max(16, triton.next_power_of_2(value_width)))
    return Blocking(
        32 if rows > 128 or dtype == torch.float32 else 64, rows, columns, num_warps=8, num_stages=2
    )


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    documents: Sequence[int] | None = None,
    *,
    reverse: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scan the tokens as ``kernels.linear_attention.scan`` does."""
    batch, length, heads, width = k.shape
    value_width = v.shape[-1]
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    if q is not None and q.stride(-1) != 1:
        q = q.contiguous()
    shape = (0,) if q is None else (batch, length, heads, value_width)
    out = v.new_empty(shape, dtype=torch.float32 if wide else v.dtype)
    final = torch.empty(batch, heads, width, value_width, dtype=torch.float32, device=k.device)
    if state is not None and state.transpose(-1, -2).is_contiguous():
        strides = 1, width
    else:
        strides = value_width, 1
        state = None if state is None else state.contiguous()
    blocking = blocking_of(width, value_width, k.dtype)
    blocks = triton.cdiv(value_width, blocking.BLOCK_E)
    ends = tuple(documents or (0, length))
    bounds, steps = segments_of(ends, parts_of(batch * heads * blocks), blocking.C, k.device)
    segments, carried = bounds.shape[1] - 1, steps.shape[1] - 1
    rates = constants(tuple(log_decay), torch.float32, k.device)

    def run(
        q: Tensor | None, state: Tensor | None, final: Tensor, own: tuple[int, int], each: bool
    ) -> None:
        takes = {
            "REVERSE": reverse,
            "HAS_STATE": state is not None,
            "OUTPUT": q is not None,
            "EACH": each,
        }
        read = k if q is None else q, k, v  # what is None is not read
        strides = *(stride for x in read for stride in x.stride()[:3]), *own
        given: Any = *read, out, k if state is None else state, final, rates, bounds, strides
        scan_kernel[batch * heads * segments, blocks](
            *given, heads, width, value_width, segments, carried,
            **takes, PRECISION="ieee", WIDEN=interpreted(), **blocking._asdict(),
        )  # fmt: skip

    if segments == len(ends) - 1:
        run(q, state, final, strides, each=False)
        return out, final
    states = torch.empty(
        batch, heads, carried, width, value_width, dtype=torch.float32, device=k.device
    )
    own = value_width, 1
    run(None, None, states, own, each=True)
    numbers = width * value_width
    given = (
        states,
        states if state is None else state,
        final,
        rates,
        steps,
        *strides,
        heads,
        value_width,
        numbers,
    )
    grid = batch * heads, triton.cdiv(numbers, SIZE)
    carry_kernel[grid](*given, carried, REVERSE=reverse, HAS_STATE=state is not None, SIZE=SIZE)
    if q is not None:
        run(q, states, states, own, each=True)
    return out, final
