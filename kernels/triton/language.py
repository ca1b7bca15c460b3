"""What the Triton kernels share: products, roundings and loads that the interpreter, too, gets right."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """Multiply in float32. The interpreter cannot multiply bfloat16; widened operands give the same product."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def rounded(x, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """Cast float32 x to ``dtype``. The interpreter truncates to bfloat16, so round first."""
    if WIDEN and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)
