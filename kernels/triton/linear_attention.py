"""Linear attention's scan as one fused Triton kernel: intra-chunk, inter-chunk and state update in one pass.

One program runs one head of one document and a block of its value channels through all chunks, and keeps the state of
these channels in float32 registers. Forward and backward share the kernel, see ``kernels.linear_attention``.

Shapes: B sequences, T tokens, H heads, D width of queries and keys, E width of values, C tokens per chunk.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear_scan import rates_of
from kernels.triton import interpreted
from kernels.triton.language import dot, rounded


@triton.jit
def scan_kernel(
    q,
    k,
    v,
    out,
    state,
    final,
    rates,
    bounds,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    state_row,
    state_column,
    H,
    D,
    E,
    documents,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_STATE: tl.constexpr,
    OUTPUT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Scan as in ``kernels.linear_attention.Scan``; out and final are contiguous, channels have stride 1."""
    document = tl.program_id(0) % documents
    row = (tl.program_id(0) // documents).to(tl.int64)  # of B * H
    batch, head = row // H, row % H
    first = tl.load(bounds + document)
    length = tl.load(bounds + document + 1) - first
    rate = tl.load(rates + head)

    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    c = tl.arange(0, C)
    held = (d < D)[:, None] & (e < E)[None, :]
    running = tl.zeros((BLOCK_D, BLOCK_E), dtype=tl.float32)
    if HAS_STATE:
        # Forwards the state enters the first document; backwards its gradient enters the last.
        entry = documents - 1 if REVERSE else 0
        states = state + row * D * E + d[:, None] * state_row + e[None, :] * state_column
        running = tl.load(states, mask=held & (document == entry), other=0.0).to(tl.float32)

    distance = c[None, :] - c[:, None] if REVERSE else c[:, None] - c[None, :]
    decay = tl.where(distance >= 0, tl.exp(rate * tl.maximum(distance, 0).to(tl.float32)), 0.0)  # [C, C]
    chunks = tl.cdiv(length, C)
    for n in range(chunks):
        start = (chunks - 1 - n if REVERSE else n) * C
        count = tl.minimum(C, length - start)
        token = (first + start + c).to(tl.int64)
        filled = c < count
        wanted_d = filled[:, None] & (d < D)[None, :]
        wanted_e = filled[:, None] & (e < E)[None, :]
        before = (c + 1).to(tl.float32)
        after = tl.maximum(count - 1 - c, 0).to(tl.float32)
        keys = tl.load(k + batch * k_batch + head * k_head + token[:, None] * k_token + d[None, :], wanted_d, 0.0)
        values = tl.load(v + batch * v_batch + head * v_head + token[:, None] * v_token + e[None, :], wanted_e, 0.0)
        if OUTPUT:
            queries = tl.load(
                q + batch * q_batch + head * q_head + token[:, None] * q_token + d[None, :], wanted_d, 0.0
            )
            scores = dot(queries, tl.trans(keys), PRECISION, WIDEN) * decay
            result = dot(queries, rounded(running, queries.dtype, WIDEN), PRECISION, WIDEN)
            result *= tl.exp(rate * (after if REVERSE else before))[:, None]
            result += dot(rounded(scores, values.dtype, WIDEN), values, PRECISION, WIDEN)
            outputs = out + ((batch * tl.load(bounds + documents) + token[:, None]) * H + head) * E + e[None, :]
            tl.store(outputs, rounded(result, out.dtype.element_ty, WIDEN), mask=wanted_e)
        weights = tl.exp(rate * (before if REVERSE else after))
        weighted = rounded(keys * weights[:, None], keys.dtype, WIDEN)
        running *= tl.exp(rate * count.to(tl.float32))
        running += dot(tl.trans(weighted), values, PRECISION, WIDEN)

    leaving = 0 if REVERSE else documents - 1
    tl.store(final + row * D * E + d[:, None] * E + e[None, :], running, mask=held & (document == leaving))


class Blocking(NamedTuple):
    """Block sizes of one program, and its launch options."""

    C: int
    BLOCK_D: int
    BLOCK_E: int
    num_warps: int
    num_stages: int


def blocking_of(width: int, value_width: int, dtype: torch.dtype) -> Blocking:
    """Return sizes whose state fits the registers: compiled for sm_80 and sm_90, bfloat16 spills <= 32 bytes to D 256.

    float32, for tests and small exact runs, spills from a width of 128 on.
    """
    rows = max(16, triton.next_power_of_2(width))
    columns = 64 if rows <= 64 and dtype != torch.float32 else 32
    columns = min(columns, max(16, triton.next_power_of_2(value_width)))
    return Blocking(32 if rows > 128 or dtype == torch.float32 else 64, rows, columns, num_warps=8, num_stages=2)


@lru_cache(maxsize=64)  # packed documents differ from batch to batch; all layers of a step ask for the same
def bounds_of(documents: tuple[int, ...], device: torch.device) -> Tensor:
    """Return cumulative lengths of documents as int32 ``[documents + 1]``; the copy to a GPU makes the host wait."""
    return torch.tensor(documents, dtype=torch.int32, device=device)


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
    """Scan the tokens as ``kernels.linear_attention.Scan`` does."""
    batch, length, heads, width = k.shape
    value_width = v.shape[-1]
    bounds = bounds_of(tuple(documents or (0, length)), k.device)
    count = len(bounds) - 1
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    if q is not None and q.stride(-1) != 1:
        q = q.contiguous()
    shape = (0,) if q is None else (batch, length, heads, value_width)
    out = v.new_empty(shape, dtype=torch.float32 if wide else v.dtype)
    final = torch.empty(batch, heads, width, value_width, dtype=torch.float32, device=k.device)
    if state is not None and state.transpose(-1, -2).is_contiguous():
        rows, columns = 1, width
    else:
        rows, columns = value_width, 1
        state = None if state is None else state.contiguous()
    blocking = blocking_of(width, value_width, k.dtype)
    grid = (batch * heads * count, triton.cdiv(value_width, blocking.BLOCK_E))
    unused: Any = k
    scan_kernel[grid](
        unused if q is None else q,
        k,
        v,
        out,
        unused if state is None else state,
        final,
        rates_of(tuple(log_decay), torch.float32, k.device),
        bounds,
        *(k if q is None else q).stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        rows,
        columns,
        heads,
        width,
        value_width,
        count,
        REVERSE=reverse,
        HAS_STATE=state is not None,
        OUTPUT=q is not None,
        PRECISION="ieee",
        WIDEN=interpreted(),
        **blocking._asdict(),
    )
    return out, final
