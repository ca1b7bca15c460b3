"""Loads, decays and products of a chunk, for the Triton kernels of the gated delta rule.

Operands are float32. For float32 inputs, and always in the inverse, a matmul is computed as three
matmuls in TF32, which lose no digit of float32. For 16-bit inputs one matmul in TF32 is enough: its
error is smaller than the rounding of the inputs.

Shapes as in ``kernels.triton.delta``. Names: ``b_`` is a block in registers; ``row`` is a sequence
and head, ``chunk`` the index of a program's chunk among the chunks of all rows.
"""

import triton
import triton.language as tl

from kernels.triton.work import dot

EXACT = tl.constexpr("tf32x3")


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Multiply matrices of one dtype.

    A GPU cuts off the bits of an operand that TF32 lacks, so round the operands first.
    """
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        b = ((b.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return dot(a, b, PRECISION, WIDEN)


@triton.jit
def numbers_of(x, strides, row, H, token, filled):
    """Load a number for each token of a row from ``[B, T, H]``; zero in empty slots."""
    base = x + row // H * strides[0] + row % H * strides[2]
    return tl.load(base + token.to(tl.int64) * strides[1], filled, 0.0).to(tl.float32)


@triton.jit
def chunk_of(g, strides, T, H, C: tl.constexpr):
    """Find the chunk of this program.

    Returns:
        The chunk's row, its index among all chunks, its slots ``[C]``, and for each slot the token,
        True if it is filled, and the gate.
    """
    row = tl.program_id(1).to(tl.int64)
    chunk = row * tl.num_programs(0) + tl.program_id(0)
    c = tl.arange(0, C)
    token = tl.program_id(0) * C + c
    filled = token < T
    return row, chunk, c, token, filled, numbers_of(g, strides[3], row, H, token, filled)


@triton.jit
def rows_of(x, strides, row, H, token, filled, channel, width):
    """Load these channels of a row's tokens from ``[B, T, H, X]``; zero in empty slots."""
    base = (
        x + row // H * strides[0] + row % H * strides[2] + token.to(tl.int64)[:, None] * strides[1]
    )
    return tl.load(base + channel[None, :], filled[:, None] & (channel < width)[None, :], 0.0)


@triton.jit
def block_of(x, i, j, width):
    """Load rows i and columns j of a contiguous matrix; zero from column ``width`` on."""
    return tl.load(x + i[:, None] * width + j[None, :], (j < width)[None, :], 0.0)


@triton.jit
def state_of(x, d, e, D, W):
    """Load rows d and columns e of a state ``[D, W]``; zero outside the state."""
    return tl.load(x + d[:, None] * W + e[None, :], (d < D)[:, None] & (e < W)[None, :], 0.0)


@triton.jit
def decay_out_of(g, strides, row, H, token, filled, C: tl.constexpr, T):
    """Return the decay from each token of a chunk to the chunk's end, ``[C]``."""
    c = tl.arange(0, C)
    later = numbers_of(g, strides, row, H, token + 1, (c < C - 1) & (token + 1 < T))
    return tl.exp(tl.cumsum(later, 0, reverse=True))


@triton.jit
def decay_between(gates, C: tl.constexpr):
    """Return the decay from column to row ``[C, C]``; zero above the diagonal."""
    c = tl.arange(0, C)
    sums = tl.cumsum(tl.where(c[:, None] > c[None, :], gates[:, None], 0.0), 0)
    return tl.where(c[:, None] >= c[None, :], tl.exp(sums), 0.0)


@triton.jit
def products_of(
    x,
    x_strides,
    k,
    k_strides,
    row,
    H,
    token,
    filled,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return x_i . k_j for the tokens of a sequence and key head, ``[C, C]``."""
    products = tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        b_x = rows_of(x, x_strides, row, H, token, filled, d, D)
        b_k = rows_of(k, k_strides, row, H, token, filled, d, D)
        products += product(b_x, tl.trans(b_k), PRECISION, WIDEN)
    return products


@triton.jit
def inverse_of(lower, C: tl.constexpr, WIDEN: tl.constexpr):
    """Return (I + lower)^-1 of a strictly lower triangular matrix ``[C, C]``, by halves.

    The inverse of a block of 2 h tokens has the inverses A and B of its two halves on the diagonal,
    and -B L A at the lower left, where ``lower`` has the quarter L. All blocks of one size are
    computed at once, in two products ``[C, C]``.
    """
    c = tl.arange(0, C)
    # The differing bits of two tokens' indices are a number below 2 h if the tokens are in the same
    # block of 2 h tokens, and below h if they are in the same half.
    differing_bits = c[:, None] ^ c[None, :]
    inverse = tl.where(differing_bits == 0, 1.0, 0.0) - tl.where(differing_bits == 1, lower, 0.0)
    half = 2
    while half < C:
        quarter = tl.where((differing_bits >= half) & (differing_bits < 2 * half), lower, 0.0)
        inverse -= product(product(inverse, quarter, EXACT, WIDEN), inverse, EXACT, WIDEN)
        half *= 2
    return inverse
