"""FlashAttention: torch's own version 2, and versions 3 and 4 through torch's registry.

The registry replaces FlashAttention 2 behind aten's operators with another version, for the whole
process. So every call of a backend first activates its version.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import attention

from kernels.backends.base import AttentionKernel, GpuBackend, Shares, pair_of
from kernels.blocks import Gradients, Keys, Rows, heads_first
from kernels.cuda import Kernel, Lengths, PackedKernel, pad_heads, with_fallback
from kernels.gpu import BLACKWELL, HOPPER, Gpu, gpu

aten = torch.ops.aten
ABSENT = "it is not installed"


class FlashAttention(GpuBackend):
    """A version of FlashAttention that torch's registry can activate."""

    impl: str
    """Name of the version in torch's registry."""
    package: str
    """Python package that the registry imports for this version."""
    capabilities: tuple[int, ...]
    """Major compute capabilities that the version supports."""
    native: int
    """Major compute capability for which the version was written."""
    max_head_dim: int
    install: str

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Return why this version cannot run with this device or dtype; None if it can."""
        refusal = super().refusal(requested, device_type, dtype)
        if refusal:
            return refusal
        problem = self.problem()
        if problem:
            return (
                f"attention_backend is {self.name}, but {problem}; install it"
                f" ({self.install}), or use auto"
            )
        return None

    def is_automatic(self, this_gpu: Gpu, is_packed: bool) -> bool:
        """Return True if this FlashAttention version was written for this GPU and can run."""
        return this_gpu.capability[0] == self.native and self.problem() is None

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, fallback: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the kernels for tiles and packed tiles; ``fallback`` computes wider heads."""
        tiles, packed = flash(self.impl)
        limit = f"takes heads of up to {self.max_head_dim} channels"

        def fits(q: Tensor, _: Tensor) -> bool:
            return q.shape[-1] <= self.max_head_dim

        packed_fallback = pair_of(fallback and fallback.packed)
        tiles = with_fallback(self.name, limit, fits, tiles, pair_of(fallback))
        packed = with_fallback(self.name, limit, fits, packed, packed_fallback)
        forward, backward = pad_heads(*tiles)
        packed_kernel = PackedKernel(*pad_heads(*packed))
        return AttentionKernel(self.name, forward, backward, packed=packed_kernel)

    @cache  # a backend is one object for the whole process  # noqa: B019
    def problem(self) -> str | None:
        """Try to activate this version once; return why it cannot run, or None if it can."""
        major, minor = gpu().capability
        if major not in self.capabilities:
            supported = " or ".join(f"{capability}.x" for capability in self.capabilities)
            return (
                f"it needs a GPU of compute capability {supported}, but this one has"
                f" {major}.{minor}"
            )
        if not hasattr(attention, "activate_flash_attention_impl"):
            return f"torch {torch.__version__} cannot activate it, but 2.11 and newer can"
        try:
            put(self.impl)
            put(None)
        except Exception as error:  # ImportError, OSError, or anything from a stub package
            if isinstance(error, ModuleNotFoundError):
                missing = (error.name or "").split(".")[0]
                if missing == self.package:
                    return ABSENT
            message = " ".join(f"{type(error).__name__}: {error}".split())
            return f"its import fails ({message})"
        return None


class FlashAttention3(FlashAttention):
    """FlashAttention 3, for Hopper."""

    name = "flash_attn_3"
    title = "FlashAttention 3"
    impl = "FA3"
    package = "flash_attn_interface"
    shares: ClassVar[Shares] = {"hopper": 0.66, "h20": 0.8}
    capabilities = (HOPPER,)
    native = HOPPER
    max_head_dim = 256
    install = "python setup.py install in hopper/ of github.com/Dao-AILab/flash-attention"


class FlashAttention4(FlashAttention):
    """FlashAttention 4, for Blackwell and also Hopper."""

    name = "flash_attn_4"
    title = "FlashAttention 4"
    impl = "FA4"
    package = "flash_attn"
    shares: ClassVar[Shares] = {"blackwell": 0.6}
    capabilities = (HOPPER, BLACKWELL)
    native = BLACKWELL
    max_head_dim = 128
    install = "pip install flash-attn-4"


def put(impl: str | None) -> None:
    """Activate a version by its name in torch's registry; None is FlashAttention 2."""
    if getattr(attention, "current_flash_attention_impl", lambda: None)() == impl:
        return
    if impl is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(impl)


def flash(impl: str | None) -> tuple[Kernel, Kernel]:
    """Return a version's attention for tiles and for packed tiles; None is FlashAttention 2."""

    def activating(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            put(impl)
            return function(*arguments)

        return call

    tiles = activating(flash_forward), activating(flash_backward)
    packed = activating(packed_forward), activating(packed_backward)
    return tiles, packed


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a tile and its log-sum-exp with FlashAttention."""
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *heads_first(q, k, v), 0.0, causal, False, scale=scale
    )
    out, lse = heads_first(out, lse)
    return out, lse


def flash_backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
    """Compute the gradients through a tile with FlashAttention."""
    no_seed = torch.zeros(2, dtype=torch.uint64, device=rows.q.device)  # used only for dropout
    max_rows = rows.q.shape[1]
    max_columns = keys.k.shape[1]
    q, dout, out, lse, k, v = heads_first(
        rows.q, rows.dout, rows.out.to(rows.q.dtype), rows.lse.float(), *keys
    )
    lse = lse.contiguous()
    cu_rows = cu_columns = None
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, cu_rows, cu_columns, max_rows, max_columns, 0.0, causal,
        no_seed, no_seed[:0], scale=scale,
    )  # fmt: skip
    dq, dk, dv = heads_first(dq, dk, dv)
    return dq, dk, dv


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of packed tiles and its log-sum-exp with FlashAttention."""
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
    return out, lse.transpose(0, 1)  # lse [H, R] -> [R, H]


def packed_backward(
    rows: Rows, keys: Keys, lengths: Lengths, causal: bool, scale: float
) -> Gradients:
    """Compute the gradients through packed tiles with FlashAttention."""
    q, dout, out, lse = rows
    k, v = keys
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # used only for dropout
    out = out.to(q.dtype)
    lse = lse.float().transpose(0, 1).contiguous()  # [H, R]
    return aten._flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, causal, no_seed, no_seed[:0], scale=scale
    )
