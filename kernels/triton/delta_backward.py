"""The gated delta rule's backward of a slab of chunks as Triton kernels.

States and changes are computed again. Then, by the formulas of ``kernels.delta.chunks``:
``read_back_kernel`` gives what outputs ask of changes, ``states_back_kernel`` goes through the
chunks from the last one with some columns of the gradient of a state in registers,
``changes_back_kernel`` and ``keys_back_kernel`` compute the gradients of each chunk. No exponential
is differentiated: a decay acts through the vectors alone that it multiplies.

Shapes as in ``kernels.triton.delta``, with W = E.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.delta import (
    block_of,
    chunk_of,
    decay_between,
    decay_out_of,
    numbers_of,
    product,
    products_of,
    rows_of,
    slab_of,
    solve,
    state_of,
)


@triton.jit(do_not_specialize=["T"])
def read_back_kernel(
    q, k, g, dout, dchanges, strides, T, H, shared,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute P^T dout of one chunk of a row."""
    row, place, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    reads = decay_between(gates, C) * products_of(
        q, strides[0], k, strides[1], row // shared, H // shared, token, filled, C, D, BLOCK, PRECISION, WIDEN
    )  # fmt: skip
    back = tl.trans(reads)
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        gradients = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
        found = product(back, gradients, PRECISION, WIDEN)
        tl.store(dchanges + (place * C + c)[:, None] * E + e[None, :], found, (e < E)[None, :])


@triton.jit(do_not_specialize=["T", "N"])
def states_back_kernel(
    q, k, g, dout, taken, dfinal, leaving, dstate, dchanges, strides, T, N, H, shared,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Go back through the chunks of a row: write the gradients of the state after each chunk, and
    of its changes.
    """
    row = tl.program_id(1).to(tl.int64)
    d, e, c = (
        tl.arange(0, ROWS),
        tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS),
        tl.arange(0, C),
    )
    held = (d < D)[:, None] & (e < E)[None, :]
    own = d[:, None] * E + e[None, :]
    key_row, key_heads = row // shared, H // shared
    running = tl.load(dfinal + row * D * E + own, held, 0.0)
    for step in range(N):
        n = N - 1 - step
        place = row * N + n
        token = n * C + c
        filled = token < T
        tl.store(leaving + place * D * E + own, running, held)
        gates = numbers_of(g, strides[3], row, H, token, filled)
        keys = rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
        keys *= decay_out_of(g, strides[3], row, H, token, filled, C, T)[:, None]
        here = dchanges + place * C * E + c[:, None] * E + e[None, :]
        change = tl.load(here, (e < E)[None, :], 0.0) + product(keys, running, PRECISION, WIDEN)
        tl.store(here, change, (e < E)[None, :])
        running *= tl.exp(tl.sum(gates, 0))
        queries = rows_of(q, strides[0], key_row, key_heads, token, filled, d, D).to(tl.float32)
        queries *= tl.exp(tl.cumsum(gates, 0))[:, None]
        gradients = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
        running += product(tl.trans(queries), gradients, PRECISION, WIDEN)
        keys_taken = block_of(taken + place * C * D, c, d, D)
        running -= product(tl.trans(keys_taken), change, PRECISION, WIDEN)
    tl.store(dstate + row * D * E + own, running, held)


@triton.jit(do_not_specialize=["T"])
def changes_back_kernel(
    q, k, v, g, beta, dout, inverse, entering, changes, dchanges, dv, dbeta, dreads, dkeys, dgates, strides,
    T, H, shared, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute dv and dbeta of one chunk of a row, the gradients of P and a before their decay, and
    what these two add to the gradients of gates."""
    row, place, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    share = numbers_of(beta, strides[4], row, H, token, filled)
    key_row, key_heads = row // shared, H // shared
    into = tl.exp(tl.cumsum(gates, 0))
    back = tl.trans(block_of(inverse + place * C * C, c, c, C))
    system = tl.zeros((C, C), dtype=tl.float32)
    read = tl.zeros((C, C), dtype=tl.float32)
    dshare = tl.zeros((C,), dtype=tl.float32)
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        solved = product(back, block_of(dchanges + place * C * E, c, e, E), PRECISION, WIDEN)
        change = tl.trans(block_of(changes + place * C * E, c, e, E))
        system -= product(solved, change, PRECISION, WIDEN)
        gradients = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
        read += product(gradients, change, PRECISION, WIDEN)
        missed = rows_of(v, strides[2], row, H, token, filled, e, E).to(tl.float32)
        for above in range(0, D, BLOCK):
            d = above + tl.arange(0, BLOCK)
            keys = (
                rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
                * into[:, None]
            )
            missed -= product(
                keys, state_of(entering + place * D * E, d, e, D, E), PRECISION, WIDEN
            )
        dshare += tl.sum(solved * missed, 1)
        at = (
            dv
            + row // H * strides[6][0]
            + row % H * strides[6][2]
            + token.to(tl.int64)[:, None] * strides[6][1]
        )
        tl.store(at + e[None, :], solved * share[:, None], filled[:, None] & (e < E)[None, :])

    decay = decay_between(gates, C)
    met = products_of(
        k, strides[1], k, strides[1], key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN
    )  # fmt: skip
    met = tl.where(c[:, None] > c[None, :], met * decay, 0.0)
    dshare += tl.sum(system * met, 1)
    at = (
        dbeta
        + row // H * strides[7][0]
        + row % H * strides[7][2]
        + token.to(tl.int64) * strides[7][1]
    )
    tl.store(at, dshare, filled)
    system *= share[:, None]
    through = system * met
    pairs = c[:, None] * C + c[None, :]
    tl.store(dkeys + place * C * C + pairs, tl.where(c[:, None] > c[None, :], system * decay, 0.0))
    through += read * decay * products_of(
        q, strides[0], k, strides[1], key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN
    )  # fmt: skip
    tl.store(dreads + place * C * C + pairs, read * decay)
    # Pairs that a gate stands between: a difference of sums over all pairs would leave the rounding
    # of the others.
    crossing = tl.where(c[None, :] < c[:, None], tl.cumsum(through, 0, reverse=True), 0.0)
    tl.store(dgates + place * C + c, tl.sum(crossing, 1))


@triton.jit(do_not_specialize=["T"])
def keys_back_kernel(
    q, k, g, dout, entering, leaving, changes, dv, dreads, dkeys, dgates, dq, dk, dg, strides, T, H, shared,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute dq and dk of one chunk of a row, for this value head alone, and dg."""
    row, place, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    key_row, key_heads = row // shared, H // shared
    into = tl.exp(tl.cumsum(gates, 0))[:, None]
    out_of = decay_out_of(g, strides[3], row, H, token, filled, C, T)[:, None]
    read = block_of(dreads + place * C * C, c, c, C)
    met = block_of(dkeys + place * C * C, c, c, C)
    both = met + tl.trans(met)
    from_start = tl.zeros((C,), dtype=tl.float32)
    to_end = tl.zeros((C,), dtype=tl.float32)
    kept = tl.zeros((BLOCK,), dtype=tl.float32)
    at = (
        row // H * strides[8][0]
        + row % H * strides[8][2]
        + token.to(tl.int64)[:, None] * strides[8][1]
    )
    for above in range(0, D, BLOCK):
        d = above + tl.arange(0, BLOCK)
        of_queries = tl.zeros((C, BLOCK), dtype=tl.float32)
        of_taken = tl.zeros((C, BLOCK), dtype=tl.float32)
        of_given = tl.zeros((C, BLOCK), dtype=tl.float32)
        for first in range(0, E, BLOCK):
            e = first + tl.arange(0, BLOCK)
            state = state_of(entering + place * D * E, d, e, D, E)
            after = state_of(leaving + place * D * E, d, e, D, E)
            kept += tl.sum(state * after, 1)
            state, after = tl.trans(state), tl.trans(after)
            gradients = rows_of(dout, strides[5], row, H, token, filled, e, E).to(tl.float32)
            of_queries += product(gradients, state, PRECISION, WIDEN)
            of_taken -= product(
                rows_of(dv, strides[6], row, H, token, filled, e, E), state, PRECISION, WIDEN
            )
            of_given += product(block_of(changes + place * C * E, c, e, E), after, PRECISION, WIDEN)
        of_queries *= into
        of_taken *= into
        of_given *= out_of
        queries = rows_of(q, strides[0], key_row, key_heads, token, filled, d, D).to(tl.float32)
        keys = rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
        from_start += tl.sum(of_queries * queries + of_taken * keys, 1)
        to_end += tl.sum(of_given * keys, 1)
        of_queries += product(read, keys, PRECISION, WIDEN)
        of_keys = of_taken + of_given + product(both, keys, PRECISION, WIDEN)
        of_keys += product(tl.trans(read), queries, PRECISION, WIDEN)
        own = filled[:, None] & (d < D)[None, :]
        tl.store(dq + at + d[None, :], of_queries, own)
        tl.store(dk + at + d[None, :], of_keys, own)
    crossing = tl.where(c[None, :] >= c[:, None], from_start[None, :], to_end[None, :])
    found = (
        tl.load(dgates + place * C + c)
        + tl.sum(crossing, 1)
        + tl.sum(kept, 0) * tl.exp(tl.sum(gates, 0))
    )
    at = (
        dg + row // H * strides[7][0] + row % H * strides[7][2] + token.to(tl.int64) * strides[7][1]
    )
    tl.store(at, found, filled)


def backward(
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    dfinal: Tensor,
    state: Tensor,
    found: tuple[Tensor, ...],
) -> Tensor:
    """Write the gradients of a slab's inputs into float32 tensors of their shapes, and return the
    state's.

    Args:
        dfinal: gradient of the state after the slab ``[B, H, D, E]``.
        state: state before it.
    """
    slab = slab_of(inputs, state.shape[-1])
    q, k, v, g, beta = slab.inputs
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dq, dk, dv, dg, dbeta = found
    (chunks, rows), (C, block, held, columns), (heads, shared) = (
        slab.grid,
        slab.blocking,
        slab.sizes,
    )
    if shared > 1:  # each value head's, to be summed
        dq, dk = (x.new_empty(*x.shape[:2], heads, x.shape[-1]) for x in (dq, dk))
    inverse, taken, entering, changes = solve(slab, state, torch.empty_like(state))
    dchanges, leaving, dstate = (
        slab.new(*changes.shape[2:]),
        slab.new(*entering.shape[2:]),
        torch.empty_like(state),
    )
    dreads, dkeys, dgates = slab.new(C, C), slab.new(C, C), slab.new(C)
    # dout is 5 of these, dv 6, the gradients of gates and beta 7, those of queries and keys 8.
    strides = slab.strides(dout, dv, dbeta, dq)
    sizes = {"D": q.shape[-1], "E": v.shape[-1], "C": C}
    each = {**sizes, "BLOCK": block, **slab.precision, "num_warps": 8, "num_stages": 1}
    rest = strides, q.shape[1], heads, shared
    read_back_kernel[chunks, rows](q, k, g, dout, dchanges, *rest, **each)
    states_back_kernel[triton.cdiv(v.shape[-1], columns), rows](
        q, k, g, dout, taken, dfinal.contiguous(), leaving, dstate, dchanges, strides, q.shape[1], chunks,
        heads, shared, **sizes, ROWS=held, COLUMNS=columns, **slab.precision, num_warps=8, num_stages=1,
    )  # fmt: skip
    changes_back_kernel[chunks, rows](
        q,
        k,
        v,
        g,
        beta,
        dout,
        inverse,
        entering,
        changes,
        dchanges,
        dv,
        dbeta,
        dreads,
        dkeys,
        dgates,
        *rest,
        **each,
    )
    keys_back_kernel[chunks, rows](
        q,
        k,
        g,
        dout,
        entering,
        leaving,
        changes,
        dv,
        dreads,
        dkeys,
        dgates,
        dq,
        dk,
        dg,
        *rest,
        **each,
    )
    if shared > 1:
        for dx, parts in zip(found, (dq, dk), strict=False):
            dx.copy_(parts.unflatten(2, (-1, shared)).sum(3))
    return dstate
