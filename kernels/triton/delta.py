"""Triton kernels that run the gated delta rule forward over a slab (a range of chunks).

The formulas are those of ``kernels.delta.chunks``, with gates per head, in three launches:
``solve_kernel`` inverts the triangular system of each chunk, ``states_kernel`` goes through the
chunks with some columns of a state in registers, and ``output_kernel`` reads the states. Nothing
else is written: products of queries and keys are recomputed, and so are decays, from gates summed
over just the tokens that a decay spans (Yang et al. 2024, arXiv:2412.06464). The backward pass is
in ``delta_backward``.

Shapes: B sequences, T tokens, H value heads, ``shared`` of them per key head, R = B H, D and E the
widths of keys and values, W the columns of a state (E, or E + D for a scan of any state), N chunks
of C tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import interpreted
from kernels.triton.delta_blocks import (
    block_of,
    chunk_of,
    decay_between,
    decay_out_of,
    inverse_of,
    numbers_of,
    product,
    products_of,
    rows_of,
    state_of,
)


@triton.jit(do_not_specialize=["T"])
def solve_kernel(
    k,  # [B, T, H / shared, D]
    v,  # [B, T, H, E]
    g,  # [B, T, H]
    beta,  # [B, T, H]
    inverse,  # [R, N, C, C], written: T
    k_solved,  # [R, N, C, D], written: T (beta K_in)
    changes,  # [R, N, C, W], the first E columns written: T (beta V)
    strides,
    T,
    H,
    shared,
    D: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Invert the triangular system of one chunk of a row; apply the inverse to keys and values."""
    row, chunk, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    b_beta = numbers_of(beta, strides[4], row, H, token, filled)
    key_row = row // shared
    key_heads = H // shared
    kk = products_of(
        k, strides[1], k, strides[1],
        key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN,
    )  # fmt: skip
    lower = tl.where(c[:, None] > c[None, :], kk * decay_between(gates, C) * b_beta[:, None], 0.0)
    b_inverse = inverse_of(lower, C, WIDEN)
    tl.store(inverse + (chunk * C + c)[:, None] * C + c[None, :], b_inverse)
    decay_in = tl.exp(tl.cumsum(gates, 0))
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        b_k = rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
        solved = product(b_inverse, b_k * (b_beta * decay_in)[:, None], PRECISION, WIDEN)
        tl.store(k_solved + (chunk * C + c)[:, None] * D + d[None, :], solved, (d < D)[None, :])
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        b_v = rows_of(v, strides[2], row, H, token, filled, e, E).to(tl.float32)
        solved = product(b_inverse, b_v * b_beta[:, None], PRECISION, WIDEN)
        tl.store(changes + (chunk * C + c)[:, None] * W + e[None, :], solved, (e < E)[None, :])


@triton.jit(do_not_specialize=["T", "N"])
def states_kernel(
    k,  # [B, T, H / shared, D]
    g,  # [B, T, H]
    k_solved,  # [R, N, C, D]
    state,  # [B, H, D, W]
    states,  # [R, N, D, W], written: the state before each chunk
    final,  # [B, H, D, W], written
    changes,  # [R, N, C, W], updated
    strides,
    T,
    N,
    H,
    shared,
    D: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Run through the chunks of a row with some columns of its state in registers."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, ROWS)
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    c = tl.arange(0, C)
    inside = (d < D)[:, None] & (e < W)[None, :]
    offset = d[:, None] * W + e[None, :]
    b_state = tl.load(state + row * D * W + offset, inside, 0.0)
    for n in range(N):
        chunk = row * N + n
        token = n * C + c
        filled = token < T
        tl.store(states + chunk * D * W + offset, b_state, inside)
        b_solved = block_of(k_solved + chunk * C * D, c, d, D)
        chunk_changes = changes + chunk * C * W + c[:, None] * W + e[None, :]
        change = tl.load(chunk_changes, (e < E)[None, :], 0.0)
        change -= product(b_solved, b_state, PRECISION, WIDEN)
        tl.store(chunk_changes, change, (e < W)[None, :])
        gates = numbers_of(g, strides[3], row, H, token, filled)
        b_k = rows_of(k, strides[1], row // shared, H // shared, token, filled, d, D).to(tl.float32)
        b_k *= decay_out_of(g, strides[3], row, H, token, filled, C, T)[:, None]
        b_state = b_state * tl.exp(tl.sum(gates, 0)) + product(
            tl.trans(b_k), change, PRECISION, WIDEN
        )
    tl.store(final + row * D * W + offset, b_state, inside)


@triton.jit(do_not_specialize=["T"])
def output_kernel(
    q,  # [B, T, H / shared, D]
    k,  # [B, T, H / shared, D]
    g,  # [B, T, H]
    states,  # [R, N, D, W]
    changes,  # [R, N, C, W]
    out,  # [B, T, H, W], written
    strides,
    out_strides,
    T,
    H,
    shared,
    D: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute Q_in S + P changes for one chunk of a row."""
    row, chunk, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    key_row = row // shared
    key_heads = H // shared
    qk = decay_between(gates, C) * products_of(
        q, strides[0], k, strides[1],
        key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN,
    )  # fmt: skip
    decay_in = tl.exp(tl.cumsum(gates, 0))
    head_out = out + row // H * out_strides[0] + row % H * out_strides[2]
    for first in range(0, W, BLOCK):
        e = first + tl.arange(0, BLOCK)
        b_out = product(qk, block_of(changes + chunk * C * W, c, e, W), PRECISION, WIDEN)
        for above in range(0, D, BLOCK):
            d = above + tl.arange(0, BLOCK)
            b_q = rows_of(q, strides[0], key_row, key_heads, token, filled, d, D).to(tl.float32)
            q_in = b_q * decay_in[:, None]
            b_state = state_of(states + chunk * D * W, d, e, D, W)
            b_out += product(q_in, b_state, PRECISION, WIDEN)
        pointers = head_out + token.to(tl.int64)[:, None] * out_strides[1] + e[None, :]
        tl.store(pointers, b_out, filled[:, None] & (e < W)[None, :])


class DeltaBlocking(NamedTuple):
    """Block sizes with which the kernels are compiled."""

    C: int
    """Number of tokens in a chunk."""
    BLOCK: int
    """Number of channels in a block."""
    ROWS: int
    """Number of rows of a state in registers."""
    COLUMNS: int
    """Number of columns of a state in registers."""


class DeltaSlab(NamedTuple):
    """Tokens of a slab (a range of chunks), and the common arguments of the kernels."""

    inputs: tuple[Tensor, ...]
    """q, k, v, g and beta ``[B, T, ...]``; channels have stride 1."""
    columns: int
    """Number of columns of a state, W."""

    @property
    def blocking(self) -> DeltaBlocking:
        """Block sizes that fit into registers and shared memory."""
        rows = max(16, triton.next_power_of_2(self.inputs[0].shape[-1]))
        return DeltaBlocking(64 if rows <= 128 else 32, 32, rows, 32)

    @property
    def grid(self) -> tuple[int, int]:
        """Launch grid: the numbers of chunks N and of rows R."""
        batch, length, heads, _ = self.inputs[2].shape
        return triton.cdiv(length, self.blocking.C), batch * heads

    def strides(self, *others: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return the strides of batch, token and head of the inputs, and of other tensors."""
        return tuple(x.stride()[:3] for x in (*self.inputs, *others))

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of value heads H, and ``shared``, the number per key head."""
        q, _, v, _, _ = self.inputs
        return v.shape[2], v.shape[2] // q.shape[2]

    @property
    def precision(self) -> dict[str, Any]:
        exact = self.inputs[0].dtype == torch.float32
        return {"PRECISION": "tf32x3" if exact else "tf32", "WIDEN": interpreted()}

    def new(self, *shape: int) -> Tensor:
        """Allocate an uninitialised float32 tensor ``[R, N, *shape]``."""
        chunks, rows = self.grid
        return self.inputs[0].new_empty(rows, chunks, *shape, dtype=torch.float32)


def slab_of(inputs: tuple[Tensor, ...], columns: int) -> DeltaSlab:
    """Return the slab of these tokens, copying inputs whose channels are not contiguous."""
    q, k, v, g, beta = inputs
    if q.stride(-1) != 1:
        q = q.contiguous()
    if k.stride(-1) != 1:
        k = k.contiguous()
    if v.stride(-1) != 1:
        v = v.contiguous()
    return DeltaSlab((q, k, v, g, beta), columns)


class Solved(NamedTuple):
    """Results of ``solve``: the forward pass uses them, and the backward pass recomputes them."""

    inverse: Tensor
    """T ``[R, N, C, C]``."""
    k_solved: Tensor
    """T (beta K_in) ``[R, N, C, D]``."""
    states: Tensor
    """States before each chunk ``[R, N, D, W]``."""
    changes: Tensor
    """Changes of the formulas ``[R, N, C, W]``."""


def solve(slab: DeltaSlab, state: Tensor, final: Tensor) -> Solved:
    """Compute the states and changes of a slab, and write the state after it to ``final``.

    ``state`` is the state before the slab, ``[B, H, D, W]``.
    """
    _, k, v, g, beta = slab.inputs
    chunks, rows = slab.grid
    C, block, state_rows, state_columns = slab.blocking
    length = k.shape[1]
    D = k.shape[-1]
    W = slab.columns
    solved = Solved(slab.new(C, C), slab.new(C, D), slab.new(D, W), slab.new(C, W))
    strides = slab.strides()
    widths = {"D": D, "E": v.shape[-1], "W": W, "C": C}
    solve_kernel[chunks, rows](
        k, v, g, beta, solved.inverse, solved.k_solved, solved.changes,
        strides, length, *slab.sizes,
        **widths, BLOCK=block, **slab.precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    states_kernel[triton.cdiv(W, state_columns), rows](
        k, g, solved.k_solved, state.contiguous(), solved.states, final, solved.changes,
        strides, length, chunks, *slab.sizes,
        **widths, ROWS=state_rows, COLUMNS=state_columns, **slab.precision,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return solved


def forward(inputs: tuple[Tensor, ...], state: Tensor, out: Tensor, final: Tensor) -> None:
    """Write a slab's outputs ``[B, T, H, W]`` and the state after it, both contiguous."""
    slab = slab_of(inputs, state.shape[-1])
    q, k, _, g, _ = slab.inputs
    solved = solve(slab, state, final)
    output_kernel[slab.grid](
        q, k, g, solved.states, solved.changes, out,
        slab.strides(), out.stride()[:3], q.shape[1], *slab.sizes,
        D=q.shape[-1], W=slab.columns, C=slab.blocking.C, BLOCK=slab.blocking.BLOCK,
        **slab.precision, num_warps=4, num_stages=1,
    )  # fmt: skip
