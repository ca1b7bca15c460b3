"""The merge of partial attention results in one launch, where torch takes five."""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit(do_not_specialize=["count", "T", "H"])
def merge_kernel(out, lse, part, part_lse, strides, count, T, H, D: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """Merge N of ``count`` rows as ``kernels.merge.merge_``; strides of batch, token and head of each tensor."""
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
    total += tl.sigmoid(new - old)[:, None] * (tl.load(part, mask=held, other=0.0).to(tl.float32) - total)
    tl.store(out, total, mask=held)
    tl.store(lse, tl.maximum(old, new) + tl.log(1.0 + tl.exp(-tl.abs(new - old))), mask=real)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold a block's result in, as ``kernels.merge.merge_``; ``out`` ``[B, T, H, D]`` or ``[T, H, D]``, float32."""
    if out.ndim == 3:
        out, lse, block_out, block_lse = (x[None] for x in (out, lse, block_out, block_lse))
    given = out, lse, block_out if block_out.stride(-1) == 1 else block_out.contiguous(), block_lse
    batch, tokens, heads, width = out.shape
    strides = tuple(stride for x in given for stride in x.stride()[:3])
    count = batch * tokens * heads
    merge_kernel[(triton.cdiv(count, ROWS),)](
        *given, strides, count, tokens, heads, D=width, WIDTH=triton.next_power_of_2(width), N=ROWS
    )
