"""Operators of model layers: matmuls, rotary positions, and the gate of a feed-forward.

torch multiplies float32 matrices on a CPU with MKL, which uses only AVX2 on AMD's processors.
oneDNN uses their AVX-512 and is about twice as fast there, so ``linear`` calls it directly. Rotary
positions and the gate are one launch each on a GPU, except under torch.compile, which fuses torch's
own operators.

Shapes: N rows (tokens), I and O widths before and after a matmul.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import flop_registry, register_flop_formula

from kernels.triton import has_triton
from runtime.simulation import SIMULATED_DEVICE

MIN_ROWS = 32
"""Minimum number of rows for oneDNN; with fewer rows, the call takes longer than the matmul."""


def _takes_onednn() -> bool:
    if TorchVersion(torch.__version__) < "2.13":
        return False  # older torch cannot split a custom backward in two, for zero-bubble pipelines
    if not torch.backends.mkldnn.is_available():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return info.exists() and "AuthenticAMD" in info.read_text(encoding="utf-8")


ONEDNN = _takes_onednn()
"""True if float32 matmuls use oneDNN on this processor."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b as ``torch.nn.functional.linear``.

    Shapes: x ``[..., I]``, weight ``[O, I]``, bias ``[O]``.
    """
    if x.device.type != "cpu" or not ONEDNN or not _suits(x, weight):
        return F.linear(x, weight, bias)
    # Computed on rows: oneDNN's operator returns a view, to which nothing could be added in place.
    rows = x.flatten(0, -2)  # [N, I]
    return _Linear.apply(rows, weight, bias).unflatten(0, x.shape[:-1])


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Return True for plain float32 tensors with enough rows for oneDNN."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    if x.shape[:-1].numel() < MIN_ROWS:
        return False
    from torch.distributed.tensor import DTensor

    if isinstance(x, DTensor) or isinstance(weight, DTensor):
        return False
    return not torch.is_autocast_enabled("cpu")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_x, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad = grad.contiguous()
        dx = dweight = dbias = None
        if need_x:
            dx = product(grad, weight.t())
        if need_weight:
            dweight = weight_gradient(grad, x)
        if need_bias:
            dbias = grad.sum(0)
        return dx, dweight, dbias


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b with oneDNN; float32, x ``[N, I]``, weight ``[O, I]`` with any strides."""
    if torch.compiler.is_compiling():
        # inductor lowers oneDNN's operator for constant weights only.
        return _product_op(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.custom_op("longmesh::product", mutates_args=())
def _product_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, weight, bias)


@_product_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad^T x ``[O, I]`` for grad ``[N, O]`` and x ``[N, I]``, summed over the N rows."""
    if grad.shape[1] <= x.shape[1]:
        return product(grad.t(), x.t())
    # oneDNN is fastest if the result is wide, so compute the transpose.
    return product(x.t(), grad.t()).t()


def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


if torch.backends.mkldnn.is_available():
    operators = (torch.ops.mkldnn._linear_pointwise, torch.ops.longmesh.product)
    # A vendored copy of this module in the same process may have registered oneDNN's operator
    # already.
    register_flop_formula([op for op in operators if op not in flop_registry])(_flops)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their tokens' angles (Su et al. 2021).

    Channels i and i + D/2 are a pair. One launch on a GPU with Triton; torch takes eight, and 12
    times as much memory traffic in bfloat16.

    Args:
        x: ``[B, T, H, D]``.
        cos, sin: ``[T, 1, D/2]``, ``[B, T, 1, D/2]`` or ``[1, T, 1, D/2]``, float32 or wider, the
            dtype of the computation.

    Returns:
        ``[B, T, H, D]`` in x's dtype.
    """
    if torch.compiler.is_compiling():
        return rotate_unfused(x, cos, sin)
    if SIMULATED_DEVICE.value == "cuda":
        return _RotatedShapes.apply(x, cos, sin)
    if not x.is_cuda or cos.dtype != torch.float32 or not has_triton():
        return rotate_unfused(x, cos, sin)
    return _Rotated.apply(x, cos, sin)


def rotate_unfused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x with torch's operators."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # [B, T, H, D/2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from kernels.triton.pointwise import rotate as fused_rotate

        ctx.save_for_backward(cos, sin)
        return fused_rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient by the opposite angle."""
        from kernels.triton.pointwise import rotate as fused_rotate

        cos, sin = ctx.saved_tensors
        return fused_rotate(gradient, cos, sin, back=True), None, None


class _RotatedShapes(torch.autograd.Function):
    """The fused rotation's shapes and memory, without data.

    Otherwise a simulation of a GPU on the CPU would count the float32 copies of torch's operators.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.empty_like(gradient, memory_format=torch.contiguous_format), None, None


Activation = Literal["silu", "gelu"]
"""Name of an activation; gelu is its tanh form (Hendrycks & Gimpel 2016)."""
ACTIVATIONS: dict[Activation, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}
"""Each activation with its backward function, which takes the result's gradient and the input."""


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute activation(gate) * up (Shazeer 2020, eq. 6), and save only gate and up.

    gate and up have the same shape and dtype. Differentiable once. Autograd would save
    activation(gate) too, which this backward pass recomputes. On a GPU with Triton each pass is one
    launch; torch takes two launches forward and three backward, and 1.7 and 1.8 times as much
    memory traffic.
    """
    if torch.compiler.is_compiling():
        return ACTIVATIONS[activation][0](gate) * up
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        if _fuses(gate):
            from kernels.triton.pointwise import gated

            return gated(gate, up, activation)
        return ACTIVATIONS[activation][0](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if _fuses(gate):
            from kernels.triton.pointwise import gated_backward

            dgate, dup = gated_backward(gradient, gate, up, ctx.activation)
            return dgate, dup, None
        activation, activation_backward = ACTIVATIONS[ctx.activation]
        dgate = gradient * up
        activation_backward(dgate, gate, grad_input=dgate)
        dup = activation(gate).mul_(gradient)
        return dgate, dup, None


def _fuses(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and has_triton()
