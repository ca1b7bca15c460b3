"""Rotary positions in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit(do_not_specialize=["count", "T", "H"])
def rotate_kernel(
    x, cos, sin, out, strides, count, T, H, BACK: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr
):
    """Turn N of ``count`` rows, each a head of a token, by the token's angles, or BACK.

    ``strides`` are of batch, token and head of x, and of batch and token of cos and sin; ``out`` is dense.
    """
    row, d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, WIDTH)
    batch, token, head = (row // (T * H)).to(tl.int64), (row // H % T).to(tl.int64), row % H
    held = (row < count)[:, None] & (d < HALF)[None, :]
    x += (batch * strides[0] + token * strides[1] + head * strides[2])[:, None] + d[None, :]
    angle = (batch * strides[3] + token * strides[4])[:, None] + d[None, :]
    out += row.to(tl.int64)[:, None] * (2 * HALF) + d[None, :]
    first, second = tl.load(x, mask=held).to(tl.float32), tl.load(x + HALF, mask=held).to(tl.float32)
    c, s = tl.load(cos + angle, mask=held), tl.load(sin + angle, mask=held)
    if BACK:
        s = -s
    tl.store(out, (first * c - second * s).to(out.dtype.element_ty), mask=held)
    tl.store(out + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=held)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """Rotate as ``kernels.rotary.rotate``, or by the opposite angles; x of 16 or 32 bits, cos and sin float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, tokens, heads, width = x.shape
    out, count, half = torch.empty(x.shape, dtype=x.dtype, device=x.device), batch * tokens * heads, width // 2
    cos, sin = (angle.contiguous().expand(batch, tokens, 1, half) for angle in (cos, sin))  # strides of 0 where shared
    rotate_kernel[(triton.cdiv(count, ROWS),)](
        x, cos, sin, out, (*x.stride()[:3], *cos.stride()[:2]), count, tokens, heads,
        BACK=back, HALF=half, WIDTH=triton.next_power_of_2(half), N=ROWS,
    )  # fmt: skip
    return out
