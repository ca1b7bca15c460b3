"""Triton kernels that run the gated delta rule backward over a slab (a range of chunks).

States and changes are recomputed. Then, by the formulas of ``kernels.delta.chunks``,
``read_back_kernel`` computes the changes' gradient through the outputs, ``states_back_kernel`` goes
back through the chunks with some columns of a state's gradient in registers, and
``changes_back_kernel`` and ``keys_back_kernel`` compute the gradients of each chunk. The gradients
of the gates follow from those of the vectors that the decays multiply, so no exponential is
differentiated.

Shapes as in ``kernels.triton.delta``, with W = E.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.delta import slab_of, solve
from kernels.triton.delta_blocks import (
    block_of,
    chunk_of,
    decay_between,
    decay_out_of,
    numbers_of,
    product,
    products_of,
    rows_of,
    state_of,
)


@triton.jit(do_not_specialize=["T"])
def read_back_kernel(
    q,  # [B, T, H / shared, D]
    k,  # [B, T, H / shared, D]
    g,  # [B, T, H]
    dout,  # [B, T, H, E]
    dchanges,  # [R, N, C, E], written
    strides,
    T,
    H,
    shared,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute P^T dout for one chunk of a row."""
    row, chunk, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    qk = decay_between(gates, C) * products_of(
        q, strides[0], k, strides[1],
        row // shared, H // shared, token, filled, C, D, BLOCK, PRECISION, WIDEN,
    )  # fmt: skip
    qk_t = tl.trans(qk)
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        b_dout = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
        change = product(qk_t, b_dout, PRECISION, WIDEN)
        tl.store(dchanges + (chunk * C + c)[:, None] * E + e[None, :], change, (e < E)[None, :])


@triton.jit(do_not_specialize=["T", "N"])
def states_back_kernel(
    q,  # [B, T, H / shared, D]
    k,  # [B, T, H / shared, D]
    g,  # [B, T, H]
    dout,  # [B, T, H, E]
    k_solved,  # [R, N, C, D]
    dfinal,  # [B, H, D, E]
    dstates,  # [R, N, D, E], written: gradient of the state after each chunk
    dstate,  # [B, H, D, E], written
    dchanges,  # [R, N, C, E], updated
    strides,
    T,
    N,
    H,
    shared,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Run back through the chunks of a row with some columns of a state's gradient in registers."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, ROWS)
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    c = tl.arange(0, C)
    inside = (d < D)[:, None] & (e < E)[None, :]
    offset = d[:, None] * E + e[None, :]
    key_row = row // shared
    key_heads = H // shared
    b_dstate = tl.load(dfinal + row * D * E + offset, inside, 0.0)
    for step in range(N):
        n = N - 1 - step
        chunk = row * N + n
        token = n * C + c
        filled = token < T
        tl.store(dstates + chunk * D * E + offset, b_dstate, inside)
        gates = numbers_of(g, strides[3], row, H, token, filled)
        b_k = rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
        b_k *= decay_out_of(g, strides[3], row, H, token, filled, C, T)[:, None]
        chunk_changes = dchanges + chunk * C * E + c[:, None] * E + e[None, :]
        change = tl.load(chunk_changes, (e < E)[None, :], 0.0) + product(
            b_k, b_dstate, PRECISION, WIDEN
        )
        tl.store(chunk_changes, change, (e < E)[None, :])
        b_dstate *= tl.exp(tl.sum(gates, 0))
        b_q = rows_of(q, strides[0], key_row, key_heads, token, filled, d, D).to(tl.float32)
        b_q *= tl.exp(tl.cumsum(gates, 0))[:, None]
        b_dout = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
        b_dstate += product(tl.trans(b_q), b_dout, PRECISION, WIDEN)
        b_solved = block_of(k_solved + chunk * C * D, c, d, D)
        b_dstate -= product(tl.trans(b_solved), change, PRECISION, WIDEN)
    tl.store(dstate + row * D * E + offset, b_dstate, inside)


@triton.jit(do_not_specialize=["T"])
def changes_back_kernel(
    q,  # [B, T, H / shared, D]
    k,  # [B, T, H / shared, D]
    v,  # [B, T, H, E]
    g,  # [B, T, H]
    beta,  # [B, T, H]
    dout,  # [B, T, H, E]
    inverse,  # [R, N, C, C]
    states,  # [R, N, D, E]
    changes,  # [R, N, C, E]
    dchanges,  # [R, N, C, E]
    dv,  # [B, T, H, E], written
    dbeta,  # [B, T, H], written
    dqk,  # [R, N, C, C], written: gradient of P before its decay
    dkk,  # [R, N, C, C], written: gradient of a before its decay
    dgates,  # [R, N, C], written: gradient of the gates through P and a
    strides,
    T,
    H,
    shared,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute the gradients through the triangular system and P of one chunk of a row."""
    row, chunk, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    b_beta = numbers_of(beta, strides[4], row, H, token, filled)
    key_row = row // shared
    key_heads = H // shared
    decay_in = tl.exp(tl.cumsum(gates, 0))
    inverse_t = tl.trans(block_of(inverse + chunk * C * C, c, c, C))
    dsystem = tl.zeros((C, C), dtype=tl.float32)
    b_dqk = tl.zeros((C, C), dtype=tl.float32)
    b_dbeta = tl.zeros((C,), dtype=tl.float32)
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        dsolved = product(inverse_t, block_of(dchanges + chunk * C * E, c, e, E), PRECISION, WIDEN)
        change_t = tl.trans(block_of(changes + chunk * C * E, c, e, E))
        dsystem -= product(dsolved, change_t, PRECISION, WIDEN)
        b_dout = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
        b_dqk += product(b_dout, change_t, PRECISION, WIDEN)
        residual = rows_of(v, strides[2], row, H, token, filled, e, E).to(tl.float32)
        for above in range(0, D, BLOCK):
            d = above + tl.arange(0, BLOCK)
            b_k = rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
            k_in = b_k * decay_in[:, None]
            b_state = state_of(states + chunk * D * E, d, e, D, E)
            residual -= product(k_in, b_state, PRECISION, WIDEN)
        b_dbeta += tl.sum(dsolved * residual, 1)
        head_dv = (
            dv
            + row // H * strides[6][0]
            + row % H * strides[6][2]
            + token.to(tl.int64)[:, None] * strides[6][1]
        )
        written = filled[:, None] & (e < E)[None, :]
        tl.store(head_dv + e[None, :], dsolved * b_beta[:, None], written)

    decay = decay_between(gates, C)
    kk = products_of(
        k, strides[1], k, strides[1],
        key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN,
    )  # fmt: skip
    kk = tl.where(c[:, None] > c[None, :], kk * decay, 0.0)
    b_dbeta += tl.sum(dsystem * kk, 1)
    head_dbeta = (
        dbeta
        + row // H * strides[7][0]
        + row % H * strides[7][2]
        + token.to(tl.int64) * strides[7][1]
    )
    tl.store(head_dbeta, b_dbeta, filled)
    dsystem *= b_beta[:, None]
    weighted = dsystem * kk
    pairs = c[:, None] * C + c[None, :]
    tl.store(dkk + chunk * C * C + pairs, tl.where(c[:, None] > c[None, :], dsystem * decay, 0.0))
    weighted += b_dqk * decay * products_of(
        q, strides[0], k, strides[1],
        key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN,
    )  # fmt: skip
    tl.store(dqk + chunk * C * C + pairs, b_dqk * decay)
    # Sum only pairs with the gate between them: a difference of sums over all pairs would keep the
    # rounding errors of the other pairs.
    crossing = tl.where(c[None, :] < c[:, None], tl.cumsum(weighted, 0, reverse=True), 0.0)
    tl.store(dgates + chunk * C + c, tl.sum(crossing, 1))


@triton.jit(do_not_specialize=["T"])
def keys_back_kernel(
    q,  # [B, T, H / shared, D]
    k,  # [B, T, H / shared, D]
    g,  # [B, T, H]
    dout,  # [B, T, H, E]
    states,  # [R, N, D, E]
    dstates,  # [R, N, D, E]: gradient of the state after each chunk
    changes,  # [R, N, C, E]
    dv,  # [B, T, H, E]
    dqk,  # [R, N, C, C]
    dkk,  # [R, N, C, C]
    dgates,  # [R, N, C]
    dq,  # [B, T, H, D], written: a gradient for each value head
    dk,  # [B, T, H, D], written: a gradient for each value head
    dg,  # [B, T, H], written
    strides,
    T,
    H,
    shared,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute dq, dk and dg of one chunk of a row."""
    row, chunk, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    key_row = row // shared
    key_heads = H // shared
    decay_in = tl.exp(tl.cumsum(gates, 0))[:, None]
    decay_out = decay_out_of(g, strides[3], row, H, token, filled, C, T)[:, None]
    b_dqk = block_of(dqk + chunk * C * C, c, c, C)
    b_dkk = block_of(dkk + chunk * C * C, c, c, C)
    symmetric_dkk = b_dkk + tl.trans(b_dkk)
    from_start = tl.zeros((C,), dtype=tl.float32)
    to_end = tl.zeros((C,), dtype=tl.float32)
    whole_chunk = tl.zeros((BLOCK,), dtype=tl.float32)
    head_rows = (
        row // H * strides[8][0]
        + row % H * strides[8][2]
        + token.to(tl.int64)[:, None] * strides[8][1]
    )
    for above in range(0, D, BLOCK):
        d = above + tl.arange(0, BLOCK)
        b_dq = tl.zeros((C, BLOCK), dtype=tl.float32)
        dk_in = tl.zeros((C, BLOCK), dtype=tl.float32)
        dk_out = tl.zeros((C, BLOCK), dtype=tl.float32)
        for first in range(0, E, BLOCK):
            e = first + tl.arange(0, BLOCK)
            b_state = state_of(states + chunk * D * E, d, e, D, E)
            b_dstate = state_of(dstates + chunk * D * E, d, e, D, E)
            whole_chunk += tl.sum(b_state * b_dstate, 1)
            state_t = tl.trans(b_state)
            dstate_t = tl.trans(b_dstate)
            b_dout = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
            b_dq += product(b_dout, state_t, PRECISION, WIDEN)
            b_dv = rows_of(dv, strides[6], row, H, token, filled, e, E)
            dk_in -= product(b_dv, state_t, PRECISION, WIDEN)
            change = block_of(changes + chunk * C * E, c, e, E)
            dk_out += product(change, dstate_t, PRECISION, WIDEN)
        b_dq *= decay_in
        dk_in *= decay_in
        dk_out *= decay_out
        b_q = rows_of(q, strides[0], key_row, key_heads, token, filled, d, D).to(tl.float32)
        b_k = rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
        from_start += tl.sum(b_dq * b_q + dk_in * b_k, 1)
        to_end += tl.sum(dk_out * b_k, 1)
        b_dq += product(b_dqk, b_k, PRECISION, WIDEN)
        b_dk = dk_in + dk_out + product(symmetric_dkk, b_k, PRECISION, WIDEN)
        b_dk += product(tl.trans(b_dqk), b_q, PRECISION, WIDEN)
        written = filled[:, None] & (d < D)[None, :]
        tl.store(dq + head_rows + d[None, :], b_dq, written)
        tl.store(dk + head_rows + d[None, :], b_dk, written)
    crossing = tl.where(c[None, :] >= c[:, None], from_start[None, :], to_end[None, :])
    b_dg = (
        tl.load(dgates + chunk * C + c)
        + tl.sum(crossing, 1)
        + tl.sum(whole_chunk, 0) * tl.exp(tl.sum(gates, 0))
    )
    head_dg = (
        dg + row // H * strides[7][0] + row % H * strides[7][2] + token.to(tl.int64) * strides[7][1]
    )
    tl.store(head_dg, b_dg, filled)


def backward(
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    dfinal: Tensor,
    state: Tensor,
    gradients: tuple[Tensor, ...],
) -> Tensor:
    """Write the gradients of a slab's inputs; return the gradient of the state before the slab.

    Args:
        dfinal: gradient of the state after the slab ``[B, H, D, E]``.
        state: state before the slab.
        gradients: float32 tensors of the inputs' shapes, written.
    """
    slab = slab_of(inputs, state.shape[-1])
    q, k, v, g, beta = slab.inputs
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    dq, dk, dv, dg, dbeta = gradients
    chunks, rows = slab.grid
    C, block, state_rows, state_columns = slab.blocking
    heads, shared = slab.sizes
    if shared > 1:  # one gradient per value head; they are summed at the end
        dq = dq.new_empty(*dq.shape[:2], heads, dq.shape[-1])
        dk = dk.new_empty(*dk.shape[:2], heads, dk.shape[-1])
    inverse, k_solved, states, changes = solve(slab, state, torch.empty_like(state))
    dchanges = slab.new(*changes.shape[2:])
    dstates = slab.new(*states.shape[2:])
    dstate = torch.empty_like(state)
    dqk = slab.new(C, C)
    dkk = slab.new(C, C)
    dgates = slab.new(C)

    # The kernels index these strides: 5 is dout, 6 is dv, 7 is dg and dbeta, 8 is dq and dk.
    strides = slab.strides(dout, dv, dbeta, dq)
    length = q.shape[1]
    sizes = {"D": q.shape[-1], "E": v.shape[-1], "C": C}
    options = {**sizes, "BLOCK": block, **slab.precision, "num_warps": 8, "num_stages": 1}
    read_back_kernel[chunks, rows](
        q, k, g, dout, dchanges, strides, length, heads, shared, **options
    )
    states_back_kernel[triton.cdiv(v.shape[-1], state_columns), rows](
        q, k, g, dout, k_solved, dfinal.contiguous(), dstates, dstate, dchanges,
        strides, length, chunks, heads, shared,
        **sizes, ROWS=state_rows, COLUMNS=state_columns, **slab.precision,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    changes_back_kernel[chunks, rows](
        q, k, v, g, beta, dout, inverse, states, changes, dchanges, dv, dbeta, dqk, dkk, dgates,
        strides, length, heads, shared, **options,
    )  # fmt: skip
    keys_back_kernel[chunks, rows](
        q, k, g, dout, states, dstates, changes, dv, dqk, dkk, dgates, dq, dk, dg,
        strides, length, heads, shared, **options,
    )  # fmt: skip

    if shared > 1:
        for gradient, parts in zip(gradients[:2], (dq, dk), strict=True):
            gradient.copy_(parts.unflatten(2, (-1, shared)).sum(3))
    return dstate
