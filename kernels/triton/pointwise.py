"""Rotary positions, a feed-forward's gate, and the merge of partial attention, one launch each.

These operators only move memory: torch's operators read and write each tensor several times (the
merge takes five launches), and one launch reads and writes it once.

Names: ``b_`` is a block in registers, as ``b_gate`` of the tensor gate.
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
"""A and B with which an activation is g * sigmoid(A g + B g^3); gelu's tanh form can be written so,
since 1 + tanh(x) is 2 sigmoid(2 x)."""
NUMBERS = 1024
"""Number of elements per program: 16 bytes of bfloat16 for each of its 128 threads."""


@triton.jit(do_not_specialize=["count", "T", "H"])
def rotate_kernel(
    x,  # [B, T, H, 2 HALF]
    cos,  # [B, T, 1, HALF]
    sin,  # [B, T, 1, HALF]
    out,  # [B, T, H, 2 HALF], contiguous
    strides,  # of batch, token and head of x, and of batch and token of cos and sin
    count,
    T,
    H,
    BACK: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """Rotate N of ``count`` rows (heads of tokens) by the tokens' angles; if BACK, backwards."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    d = tl.arange(0, WIDTH)
    batch = (row // (T * H)).to(tl.int64)
    token = (row // H % T).to(tl.int64)
    head = row % H
    inside = (row < count)[:, None] & (d < HALF)[None, :]
    x += (batch * strides[0] + token * strides[1] + head * strides[2])[:, None] + d[None, :]
    angle = (batch * strides[3] + token * strides[4])[:, None] + d[None, :]
    out += row.to(tl.int64)[:, None] * (2 * HALF) + d[None, :]
    first = tl.load(x, mask=inside).to(tl.float32)
    second = tl.load(x + HALF, mask=inside).to(tl.float32)
    c = tl.load(cos + angle, mask=inside)
    s = tl.load(sin + angle, mask=inside)
    if BACK:
        s = -s
    tl.store(out, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """Rotate as ``kernels.operators.rotate``, or by the opposite angles if ``back``.

    x has 16 or 32 bits; cos and sin are float32.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = batch * tokens * heads
    half = width // 2
    # Dimensions that share angles get stride 0.
    cos = cos.contiguous().expand(batch, tokens, 1, half)
    sin = sin.contiguous().expand(batch, tokens, 1, half)
    strides = (*x.stride()[:3], *cos.stride()[:2])
    rotate_kernel[(triton.cdiv(count, ROWS),)](
        x, cos, sin, out, strides, count, tokens, heads,
        BACK=back, HALF=half, WIDTH=triton.next_power_of_2(half), N=ROWS,
    )  # fmt: skip
    return out


@triton.jit
def gate_kernel(gate, up, out, count, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """Write gate * sigmoid(A gate + B gate^3) * up for N of ``count`` numbers, rounded once.

    ``count`` is specialized, because 16 bytes are loaded at a time only if Triton knows that 16
    divides it.
    """
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    g = tl.load(gate + i, mask=i < count).to(tl.float32)
    u = tl.load(up + i, mask=i < count).to(tl.float32)
    outputs = out + i
    result = g * tl.sigmoid(g * (A + B * g * g)) * u
    tl.store(outputs, result.to(out.dtype.element_ty), mask=i < count)


@triton.jit
def gate_backward_kernel(
    dout, gate, up, dgate, dup, count, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr
):
    """Write the gradients of gate and up for N of ``count`` numbers, each rounded once."""
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    g = tl.load(gate + i, mask=i < count).to(tl.float32)
    u = tl.load(up + i, mask=i < count).to(tl.float32)
    d = tl.load(dout + i, mask=i < count).to(tl.float32)
    share = tl.sigmoid(g * (A + B * g * g))
    slope = share * (1 + g * (A + 3 * B * g * g) * (1 - share))
    tl.store(dgate + i, (d * u * slope).to(dgate.dtype.element_ty), mask=i < count)
    tl.store(dup + i, (d * g * share).to(dup.dtype.element_ty), mask=i < count)


def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Return activation(gate) * up for tensors of one shape, of 16 or 32 bits."""
    gate = gate.contiguous()
    up = up.contiguous()
    a, b = ACTIVATIONS[activation]
    out = torch.empty_like(gate)
    count = gate.numel()
    gate_kernel[(triton.cdiv(count, NUMBERS),)](gate, up, out, count, A=a, B=b, N=NUMBERS)
    return out


def gated_backward(
    dout: Tensor, gate: Tensor, up: Tensor, activation: str = "silu"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, given the gradient of the result of ``gated``."""
    dout = dout.contiguous()
    gate = gate.contiguous()
    up = up.contiguous()
    a, b = ACTIVATIONS[activation]
    dgate = torch.empty_like(gate)
    dup = torch.empty_like(up)
    count = gate.numel()
    gate_backward_kernel[(triton.cdiv(count, NUMBERS),)](
        dout, gate, up, dgate, dup, count, A=a, B=b, N=NUMBERS
    )
    return dgate, dup


@triton.jit(do_not_specialize=["count", "T", "H"])
def merge_kernel(
    out,  # [B, T, H, D], updated
    lse,  # [B, T, H], updated
    part,  # [B, T, H, D]
    part_lse,  # [B, T, H]
    strides,  # of batch, token and head of each tensor
    count,
    T,
    H,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
):
    """Merge N of ``count`` rows as ``kernels.blocks.merge_``."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    d = tl.arange(0, WIDTH)
    batch = (row // (T * H)).to(tl.int64)
    token = (row // H % T).to(tl.int64)
    head = row % H
    out += (batch * strides[0] + token * strides[1] + head * strides[2])[:, None] + d[None, :]
    lse += batch * strides[3] + token * strides[4] + head * strides[5]
    part += (batch * strides[6] + token * strides[7] + head * strides[8])[:, None] + d[None, :]
    part_lse += batch * strides[9] + token * strides[10] + head * strides[11]
    real = row < count
    old = tl.load(lse, mask=real, other=0.0)
    new = tl.load(part_lse, mask=real, other=0.0)
    inside = real[:, None] & (d < D)[None, :]
    total = tl.load(out, mask=inside, other=0.0)
    weight = tl.sigmoid(new - old)[:, None]
    total += weight * (tl.load(part, mask=inside, other=0.0).to(tl.float32) - total)
    tl.store(out, total, mask=inside)
    tl.store(lse, tl.maximum(old, new) + tl.log(1.0 + tl.exp(-tl.abs(new - old))), mask=real)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's result into the running one, as ``kernels.blocks.merge_``.

    ``out`` is float32, ``[B, T, H, D]`` or ``[T, H, D]``.
    """
    if out.ndim == 3:
        out = out[None]
        lse = lse[None]
        block_out = block_out[None]
        block_lse = block_lse[None]
    if block_out.stride(-1) != 1:
        block_out = block_out.contiguous()
    tensors = (out, lse, block_out, block_lse)
    strides = tuple(stride for x in tensors for stride in x.stride()[:3])
    batch, tokens, heads, width = out.shape
    count = batch * tokens * heads
    merge_kernel[(triton.cdiv(count, ROWS),)](
        *tensors, strides, count, tokens, heads,
        D=width, WIDTH=triton.next_power_of_2(width), N=ROWS,
    )  # fmt: skip
