"""The gated delta rule of a slab of chunks as Triton kernels, forward; gates per head. Backward:
``delta_backward``.

The formulas are those of ``kernels.delta.chunks``, in three launches: ``solve_kernel`` inverts the
triangular system of each chunk, ``states_kernel`` goes through the chunks with some columns of a
state in registers, and ``output_kernel`` reads the states. Nothing else is written: decays and
products of queries and keys are computed again where they are needed, from the gates, whose sums
are over just the tokens that a decay spans (Yang et al. 2024, arXiv:2412.06464).

Operands are float32. Where the inputs are, and in the inverse always, a product is three of TF32,
which cost no digit that float32 has; inputs of 16 bits lose more by their own rounding than one
product of TF32 does.

Shapes: B sequences, T tokens, H value heads, ``shared`` of them to a key head, R = B H, D and E the
widths of keys and values, W the columns of a state (E, or E + D for a scan of any state), N chunks
of C tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import interpreted
from kernels.triton.work import dot

EXACT = tl.constexpr("tf32x3")


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Multiply matrices of one dtype. What TF32 cannot hold of an operand is rounded off, as a GPU
    cuts it off.
    """
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        b = ((b.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return dot(a, b, PRECISION, WIDEN)


@triton.jit
def numbers_of(x, strides, row, H, token, filled):
    """Load a number for each token of a row from ``[B, T, H]``, zero where there is none."""
    at = x + row // H * strides[0] + row % H * strides[2]
    return tl.load(at + token.to(tl.int64) * strides[1], filled, 0.0).to(tl.float32)


@triton.jit
def chunk_of(g, strides, T, H, C: tl.constexpr):
    """Return a program's row and place among all, the tokens of its chunk, which of them there are,
    and their gates.
    """
    row = tl.program_id(1).to(tl.int64)
    place, c = row * tl.num_programs(0) + tl.program_id(0), tl.arange(0, C)
    token = tl.program_id(0) * C + c
    filled = token < T
    return row, place, c, token, filled, numbers_of(g, strides[3], row, H, token, filled)


@triton.jit
def rows_of(x, strides, row, H, token, filled, channel, width):
    """Load these channels of the tokens of a row from ``[B, T, H, X]``, zero where there are none."""
    at = x + row // H * strides[0] + row % H * strides[2] + token.to(tl.int64)[:, None] * strides[1]
    return tl.load(at + channel[None, :], filled[:, None] & (channel < width)[None, :], 0.0)


@triton.jit
def block_of(x, i, j, width):
    """Load rows i and columns j of a contiguous matrix, zero from column ``width`` on."""
    return tl.load(x + i[:, None] * width + j[None, :], (j < width)[None, :], 0.0)


@triton.jit
def state_of(x, d, e, D, W):
    """Load rows d and columns e of a state ``[D, W]``, zero outside it."""
    return tl.load(x + d[:, None] * W + e[None, :], (d < D)[:, None] & (e < W)[None, :], 0.0)


@triton.jit
def decay_out_of(g, strides, row, H, token, filled, C: tl.constexpr, T):
    """Return the decay from each token of a chunk to its end, ``[C]``."""
    c = tl.arange(0, C)
    later = numbers_of(g, strides, row, H, token + 1, (c < C - 1) & (token + 1 < T))
    return tl.exp(tl.cumsum(later, 0, reverse=True))


@triton.jit
def decay_between(gates, C: tl.constexpr):
    """Return the decay from the token of a column to that of a row, ``[C, C]``, zero above the
    diagonal.
    """
    c = tl.arange(0, C)
    sums = tl.cumsum(tl.where(c[:, None] > c[None, :], gates[:, None], 0.0), 0)
    return tl.where(c[:, None] >= c[None, :], tl.exp(sums), 0.0)


@triton.jit
def products_of(
    x, x_strides, k, k_strides, row, H, token, filled, C: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return x_i . k_j of the tokens of a row of B times key heads, ``[C, C]``."""
    found = tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        xs = rows_of(x, x_strides, row, H, token, filled, d, D)
        keys = rows_of(k, k_strides, row, H, token, filled, d, D)
        found += product(xs, tl.trans(keys), PRECISION, WIDEN)
    return found


@triton.jit
def inverse_of(lower, C: tl.constexpr, WIDEN: tl.constexpr):
    """Return (I + lower)^-1 of a strictly lower matrix ``[C, C]``, by halves: whose blocks are
    bounded.

    The inverse of blocks of 2 h tokens is that of their halves, less their product around the lower
    left quarter.
    """
    c = tl.arange(0, C)
    apart = (
        c[:, None] ^ c[None, :]
    )  # below 2 h, two tokens lie in one block of 2 h, and below h in the same half
    found = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, lower, 0.0)
    half = 2
    while half < C:
        quarter = tl.where((apart >= half) & (apart < 2 * half), lower, 0.0)
        found -= product(product(found, quarter, EXACT, WIDEN), found, EXACT, WIDEN)
        half *= 2
    return found


@triton.jit(do_not_specialize=["T"])
def solve_kernel(
    k, v, g, beta, inverse, taken, changes, strides, T, H, shared,
    D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute T, T (beta K_in) and, as the first E columns of ``changes``, T (beta V) of one chunk
    of a row.
    """
    row, place, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    share = numbers_of(beta, strides[4], row, H, token, filled)
    key_row, key_heads = row // shared, H // shared
    met = products_of(
        k, strides[1], k, strides[1], key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN
    )  # fmt: skip
    lower = tl.where(c[:, None] > c[None, :], met * decay_between(gates, C) * share[:, None], 0.0)
    solved = inverse_of(lower, C, WIDEN)
    tl.store(inverse + (place * C + c)[:, None] * C + c[None, :], solved)
    into = tl.exp(tl.cumsum(gates, 0))
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        keys = rows_of(k, strides[1], key_row, key_heads, token, filled, d, D).to(tl.float32)
        found = product(solved, keys * (share * into)[:, None], PRECISION, WIDEN)
        tl.store(taken + (place * C + c)[:, None] * D + d[None, :], found, (d < D)[None, :])
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        values = rows_of(v, strides[2], row, H, token, filled, e, E).to(tl.float32)
        found = product(solved, values * share[:, None], PRECISION, WIDEN)
        tl.store(changes + (place * C + c)[:, None] * W + e[None, :], found, (e < E)[None, :])


@triton.jit(do_not_specialize=["T", "N"])
def states_kernel(
    k, g, taken, state, entering, final, changes, strides, T, N, H, shared,
    D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of a row with some columns of its state: write it before each chunk,
    and the changes.
    """
    row = tl.program_id(1).to(tl.int64)
    d, e, c = (
        tl.arange(0, ROWS),
        tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS),
        tl.arange(0, C),
    )
    held = (d < D)[:, None] & (e < W)[None, :]
    own = d[:, None] * W + e[None, :]
    running = tl.load(state + row * D * W + own, held, 0.0)
    for n in range(N):
        place = row * N + n
        token = n * C + c
        filled = token < T
        tl.store(entering + place * D * W + own, running, held)
        keys_taken = block_of(taken + place * C * D, c, d, D)
        here = changes + place * C * W + c[:, None] * W + e[None, :]
        change = tl.load(here, (e < E)[None, :], 0.0)
        change -= product(keys_taken, running, PRECISION, WIDEN)
        tl.store(here, change, (e < W)[None, :])
        gates = numbers_of(g, strides[3], row, H, token, filled)
        keys = rows_of(k, strides[1], row // shared, H // shared, token, filled, d, D).to(
            tl.float32
        )
        keys *= decay_out_of(g, strides[3], row, H, token, filled, C, T)[:, None]
        running = running * tl.exp(tl.sum(gates, 0)) + product(
            tl.trans(keys), change, PRECISION, WIDEN
        )
    tl.store(final + row * D * W + own, running, held)


@triton.jit(do_not_specialize=["T"])
def output_kernel(
    q, k, g, entering, changes, out, strides, out_strides, T, H, shared,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute Q_in S + P changes of one chunk of a row."""
    row, place, c, token, filled, gates = chunk_of(g, strides, T, H, C)
    key_row, key_heads = row // shared, H // shared
    reads = decay_between(gates, C) * products_of(
        q, strides[0], k, strides[1], key_row, key_heads, token, filled, C, D, BLOCK, PRECISION, WIDEN
    )  # fmt: skip
    into = tl.exp(tl.cumsum(gates, 0))
    outputs = out + row // H * out_strides[0] + row % H * out_strides[2]
    for first in range(0, W, BLOCK):
        e = first + tl.arange(0, BLOCK)
        found = product(reads, block_of(changes + place * C * W, c, e, W), PRECISION, WIDEN)
        for above in range(0, D, BLOCK):
            d = above + tl.arange(0, BLOCK)
            queries = (
                rows_of(q, strides[0], key_row, key_heads, token, filled, d, D).to(tl.float32)
                * into[:, None]
            )
            found += product(
                queries, state_of(entering + place * D * W, d, e, D, W), PRECISION, WIDEN
            )
        at = outputs + token.to(tl.int64)[:, None] * out_strides[1] + e[None, :]
        tl.store(at, found, filled[:, None] & (e < W)[None, :])


class Blocking(NamedTuple):
    """Block sizes: tokens of a chunk, channels of a block, rows and columns of a state in
    registers.
    """

    C: int
    BLOCK: int
    ROWS: int
    COLUMNS: int


class Slab(NamedTuple):
    """Tokens that are computed at once, and what the kernels' launches share."""

    inputs: tuple[Tensor, ...]
    """q, k, v, g and beta ``[B, T, ...]``, channels of stride 1."""
    columns: int
    """W."""

    @property
    def blocking(self) -> Blocking:
        """Sizes that fit registers and shared memory."""
        rows = max(16, triton.next_power_of_2(self.inputs[0].shape[-1]))
        return Blocking(64 if rows <= 128 else 32, 32, rows, 32)

    @property
    def grid(self) -> tuple[int, int]:
        """N and R."""
        batch, length, heads, _ = self.inputs[2].shape
        return triton.cdiv(length, self.blocking.C), batch * heads

    def strides(self, *more: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return strides of batch, token and head of the inputs, and of other tensors."""
        return tuple(x.stride()[:3] for x in (*self.inputs, *more))

    @property
    def sizes(self) -> tuple[int, int]:
        """H and ``shared``."""
        q, _, v, _, _ = self.inputs
        return v.shape[2], v.shape[2] // q.shape[2]

    @property
    def precision(self) -> dict[str, Any]:
        exact = self.inputs[0].dtype == torch.float32
        return {"PRECISION": "tf32x3" if exact else "tf32", "WIDEN": interpreted()}

    def new(self, *shape: int) -> Tensor:
        """Allocate float32 ``[R, N, *shape]``."""
        chunks, rows = self.grid
        return self.inputs[0].new_empty(rows, chunks, *shape, dtype=torch.float32)


def slab_of(inputs: tuple[Tensor, ...], columns: int) -> Slab:
    """Return the slab of these tokens."""
    q, k, v, g, beta = inputs
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return Slab((q, k, v, g, beta), columns)


class Solved(NamedTuple):
    """Tensors of the forward that the backward needs."""

    inverse: Tensor
    """T ``[R, N, C, C]``."""
    taken: Tensor
    """``[R, N, C, D]``."""
    entering: Tensor
    """States before each chunk ``[R, N, D, W]``."""
    changes: Tensor
    """``[R, N, C, W]``."""


def solve(slab: Slab, state: Tensor, final: Tensor) -> Solved:
    """Compute states and changes of a slab from the state before it ``[B, H, D, W]``; write the one
    after it.
    """
    _, k, v, g, beta = slab.inputs
    (chunks, rows), (C, block, held, columns), W = slab.grid, slab.blocking, slab.columns
    D, E = k.shape[-1], v.shape[-1]
    found = Solved(slab.new(C, C), slab.new(C, D), slab.new(D, W), slab.new(C, W))
    widths = {"D": D, "E": E, "W": W, "C": C}
    solve_kernel[chunks, rows](
        k, v, g, beta, found.inverse, found.taken, found.changes, slab.strides(), k.shape[1], *slab.sizes,
        **widths, BLOCK=block, **slab.precision, num_warps=4, num_stages=1,
    )  # fmt: skip
    states_kernel[triton.cdiv(W, columns), rows](
        k, g, found.taken, state.contiguous(), found.entering, final, found.changes, slab.strides(), k.shape[1],
        chunks, *slab.sizes, **widths, ROWS=held, COLUMNS=columns, **slab.precision, num_warps=8, num_stages=1,
    )  # fmt: skip
    return found


def forward(inputs: tuple[Tensor, ...], state: Tensor, out: Tensor, final: Tensor) -> None:
    """Write the outputs of a slab ``[B, T, H, W]`` and the state after it, contiguous."""
    slab = slab_of(inputs, state.shape[-1])
    q, k, _, g, _ = slab.inputs
    solved = solve(slab, state, final)
    output_kernel[slab.grid](
        q, k, g, solved.entering, solved.changes, out, slab.strides(), out.stride()[:3], q.shape[1], *slab.sizes,
        D=q.shape[-1], W=slab.columns, C=slab.blocking.C, BLOCK=slab.blocking.BLOCK, **slab.precision,
        num_warps=4, num_stages=1,
    )  # fmt: skip
