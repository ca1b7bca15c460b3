"""Products of activations and weights, on a CPU by the faster of torch's two libraries.

For float32 torch takes MKL, which keeps to AVX2 on AMD's processors; oneDNN uses their AVX-512 and is about twice as
fast there.

Shapes: N rows (tokens), I and O widths before and after the product.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import flop_registry, register_flop_formula

FEWEST_ROWS = 32
"""Below them a product takes less time than its call."""


def _takes_onednn() -> bool:
    if TorchVersion(torch.__version__) < "2.13":  # which cannot part a backward of our own in two (zero bubble)
        return False
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    info = Path("/proc/cpuinfo")
    return info.exists() and "AuthenticAMD" in info.read_text(encoding="utf-8")


ONEDNN = _takes_onednn()
"""True if float32 products go to oneDNN on this processor."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b as ``torch.nn.functional.linear``: x ``[..., I]``, weight ``[O, I]``, bias ``[O]``."""
    if x.device.type != "cpu" or not ONEDNN or not _suits(x, weight):
        return F.linear(x, weight, bias)
    # In rows: oneDNN's operator returns a view of others, which nothing could be added to in place.
    return _Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _suits(x: Tensor, weight: Tensor) -> bool:
    """Return whether these are plain tensors in float32, with enough rows."""
    if (x.dtype, weight.dtype) != (torch.float32, torch.float32) or x.shape[:-1].numel() < FEWEST_ROWS:
        return False
    from torch.distributed.tensor import DTensor

    return not (isinstance(x, DTensor) or isinstance(weight, DTensor) or torch.is_autocast_enabled("cpu"))


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
        dx = product(grad, weight.t()) if need_x else None
        dw = weight_gradient(grad, x) if need_weight else None
        return dx, dw, grad.sum(0) if need_bias else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b by oneDNN; float32, x ``[N, I]``, weight ``[O, I]`` with any strides."""
    if torch.compiler.is_compiling():  # inductor knows oneDNN's operator for constant weights alone
        return _product_op(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.custom_op("longmesh::product", mutates_args=())
def _product_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, weight, bias)


@_product_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the sum over rows of the outer products of grad ``[N, O]`` and x ``[N, I]``: ``[O, I]``."""
    turned = grad.shape[1] > x.shape[1]  # oneDNN is fastest where the result is wide
    left, right = (x, grad) if turned else (grad, x)
    found = product(left.t(), right.t())
    return found.t() if turned else found


def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


if torch.backends.mkldnn.is_available():
    operators = (torch.ops.mkldnn._linear_pointwise, torch.ops.longmesh.product)
    # A vendored copy in the same process may have registered oneDNN's.
    register_flop_formula([one for one in operators if one not in flop_registry])(_flops)
