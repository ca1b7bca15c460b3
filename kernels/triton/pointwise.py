"""Rotary positions, a feed-forward's gate and its gradients, and the merge of partial attention, in
one launch each.

For the merge torch takes five.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
ACTIVATIONS = {
    "silu": (1.0, 0.0),
    "gelu": (2 * (2 / math.pi) ** 0.5, 2 * (2 / math.pi) ** 0.5 * 0.044715),
}
"""A and B of g * sigmoid(A g + B g^3), which both activations are: 1 + tanh(x) is 2 sigmoid(2 x).
"""
NUMBERS = 1024
"""Numbers of a program: 16 bytes of bfloat16 for each of its 128 threads."""


@triton.jit(do_not_specialize=["count", "T", "H"])
def rotate_kernel(
    x,
    cos,
    sin,
    out,
    strides,
    count,
    T,
    H,
    BACK: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """Turn N of ``count`` rows, each a head of a token, by the token's angles, or BACK.

    ``strides`` are of batch, token and head of x, and of batch and token of cos and sin; ``out`` is
    dense.
    """
    row, d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, WIDTH)
    batch, token, head = (row // (T * H)).to(tl.int64), (row // H % T).to(tl.int64), row % H
    held = (row < count)[:, None] & (d < HALF)[None, :]
    x += (batch * strides[0] + token * strides[1] + head * strides[2])[:, None] + d[None, :]
    angle = (batch * strides[3] + token * strides[4])[:, None] + d[None, :]
    out += row.to(tl.int64)[:, None] * (2 * HALF) + d[None, :]
    first, second = (
        tl.load(x, mask=held).to(tl.float32),
        tl.load(x + HALF, mask=held).to(tl.float32),
    )
    c, s = tl.load(cos + angle, mask=held), tl.load(sin + angle, mask=held)
    if BACK:
        s = -s
    tl.store(out, (first * c - second * s).to(out.dtype.element_ty), mask=held)
    tl.store(out + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=held)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """Rotate as ``kernels.operators.rotate``, or by the opposite angles; x of 16 or 32 bits, cos
    and sin float32.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, tokens, heads, width = x.shape
    out, count, half = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        batch * tokens * heads,
        width // 2,
    )
    cos, sin = (
        angle.contiguous().expand(batch, tokens, 1, half) for angle in (cos, sin)
    )  # strides of 0 where shared
    rotate_kernel[(triton.cdiv(count, ROWS),)](
        x, cos, sin, out, (*x.stride()[:3], *cos.stride()[:2]), count, tokens, heads,
        BACK=back, HALF=half, WIDTH=triton.next_power_of_2(half), N=ROWS,
    )  # fmt: skip
    return out


@triton.jit
def gate_kernel(gate, up, out, count, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """Write gate * sigmoid(A gate + B gate^3) * up for N of ``count`` numbers, rounded once.

    That 16 divides ``count`` must be known, or 16 bytes would not be loaded at once.
    """
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    g, u = (
        tl.load(gate + at, mask=at < count).to(tl.float32),
        tl.load(up + at, mask=at < count).to(tl.float32),
    )
    tl.store(
        out + at,
        (g * tl.sigmoid(g * (A + B * g * g)) * u).to(out.dtype.element_ty),
        mask=at < count,
    )


@triton.jit
def gate_backward_kernel(
    dout, gate, up, dgate, dup, count, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr
):
    """Write the gradients of gate and up for N of ``count`` numbers, each rounded once."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    g, u = (
        tl.load(gate + at, mask=at < count).to(tl.float32),
        tl.load(up + at, mask=at < count).to(tl.float32),
    )
    d, share = tl.load(dout + at, mask=at < count).to(tl.float32), tl.sigmoid(g * (A + B * g * g))
    slope = share * (1 + g * (A + 3 * B * g * g) * (1 - share))
    tl.store(dgate + at, (d * u * slope).to(dgate.dtype.element_ty), mask=at < count)
    tl.store(dup + at, (d * g * share).to(dup.dtype.element_ty), mask=at < count)


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Return activation(gate) * up, of any one shape and of 16 or 32 bits."""
    gate, up = gate.contiguous(), up.contiguous()
    (a, b), out, count = ACTIVATIONS[activation], torch.empty_like(gate), gate.numel()
    gate_kernel[(triton.cdiv(count, NUMBERS),)](gate, up, out, count, A=a, B=b, N=NUMBERS)
    return out


def gated_backward(
    dout: Tensor, gate: Tensor, up: Tensor, activation: str = "silu"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up for that of ``gated``."""
    dout, gate, up = (x.contiguous() for x in (dout, gate, up))
    (a, b), dgate, dup, count = (
        ACTIVATIONS[activation],
        torch.empty_like(gate),
        torch.empty_like(up),
        gate.numel(),
    )
    gate_backward_kernel[(triton.cdiv(count, NUMBERS),)](
        dout, gate, up, dgate, dup, count, A=a, B=b, N=NUMBERS
    )
    return dgate, dup


@triton.jit(do_not_specialize=["count", "T", "H"])
def merge_kernel(
    out,
    lse,
    part,
    part_lse,
    strides,
    count,
    T,
    H,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """Merge N of ``count`` rows as ``kernels.blocks.merge_``; strides of batch, token and head of
    each tensor.
    """
    row, d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, WIDTH)
    batch, token, head = (row // (T * H)).to(tl.int64), (row // H % T).to(tl.int64), row % H
    out += (batch * strides[0] + token * strides[1] + head * strides[2])[:, None] + d[None, :]
    lse += batch * strides[3] + token * strides[4] + head * strides[5]
    part += (batch * strides[6] + token * strides[7] + head * strides[8])[:, None] + d[None, :]
    part_lse += batch * strides[9] + token * strides[10] + head * strides[11]
    real = row < count
    old, new = tl.load(lse, mask=real, other=0.0), tl.load(part_lse, mask=real, other=0.0)
    held = real[:, None] & (d < D)[None, :]
    total = tl.load(out, mask=held, other=0.0)
    total += tl.sigmoid(new - old)[:, None] * (
        tl.load(part, mask=held, other=0.0).to(tl.float32) - total
    )
    tl.store(out, total, mask=held)
    tl.store(lse, tl.maximum(old, new) + tl.log(1.0 + tl.exp(-tl.abs(new - old))), mask=real)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold a block's result in, as ``kernels.blocks.merge_``; ``out`` ``[B, T, H, D]`` or ``[T, H,
    D]``, float32.
    """
    if out.ndim == 3:
        out, lse, block_out, block_lse = (x[None] for x in (out, lse, block_out, block_lse))
    given = out, lse, block_out if block_out.stride(-1) == 1 else block_out.contiguous(), block_lse
    batch, tokens, heads, width = out.shape
    strides = tuple(stride for x in given for stride in x.stride()[:3])
    count = batch * tokens * heads
    merge_kernel[(triton.cdiv(count, ROWS),)](
        *given, strides, count, tokens, heads, D=width, WIDTH=triton.next_power_of_2(width), N=ROWS
    )
