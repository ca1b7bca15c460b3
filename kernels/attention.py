"""Attention of one block, forward and backward: the backends and their selection.

Shapes: q ``[B, T, H, D]``, k and v ``[B, S, K, D]`` with H a multiple of K, lse ``[B, T, H]`` float32 or wider.
Blocks are FULL, CAUSAL or ANTI (``kernels.blocks``); the last two are always square, since kernels disagree on how to
align a rectangle. Reversed along tokens, an ANTI block is a CAUSAL one, so it needs no kernel. Never pass a backend a
fully masked row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import cudnn, installed, onednn, reference
from kernels.blocks import ANTI, CAUSAL, FULL, Gradients, Keys, Rows, Tile
from kernels.packed import Lengths, Packed
from kernels.strips import Strips, heads_first
from kernels.triton import has_triton, interpreted
from runtime.errors import UserError

aten = torch.ops.aten
VERSIONS = installed.VERSIONS
Kernel = tuple[Callable[..., Any], Callable[..., Any]]
"""A forward and its backward."""


class Tiled(Protocol):
    """A kernel that takes lists of tiles by itself; arguments and results as in ``kernels.tiles``."""

    def attend_(self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
        """Fold the attention of these tiles into running results, in place."""

    def add_gradients_(self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place."""


@dataclass(frozen=True)
class AttentionBackend:
    """A forward (q, k, v, causal, scale) -> (out, lse), and its backward.

    ``tiled`` takes all tiles, ``packed`` the small ones together; without either they are taken one by one.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Rows, Keys, bool, float], Gradients]
    tiled: Tiled | None = None
    packed: Packed | None = None


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float, backend: AttentionBackend | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention of the queries to these keys only.

    Returns:
        out ``[B, T, H, D]`` (float32 or wider on the CPU, the inputs' dtype on a GPU) and lse ``[B, T, H]``.
    """
    backend = backend or select_backend("auto", q.device.type, q.dtype)
    q, k, v = flip_if_anti(kind, q, k, v)
    out, lse = flip_if_anti(kind, *backend.forward(q, k, v, _is_causal(q, k, kind), scale))
    return out, lse


def block_backward(
    rows: Rows, keys: Keys, kind: str, scale: float, backend: AttentionBackend | None = None
) -> Gradients:
    """Compute the gradients through this block; dtypes as in ``block_forward``."""
    backend = backend or select_backend("auto", rows.q.device.type, rows.q.dtype)
    rows, keys = Rows(*flip_if_anti(kind, *rows)), Keys(*flip_if_anti(kind, *keys))
    dq, dk, dv = flip_if_anti(kind, *backend.backward(rows, keys, _is_causal(rows.q, keys.k, kind), scale))
    return dq, dk, dv


@cache
def select_backend(name: str, device_type: str, dtype: torch.dtype, documents: bool = False) -> AttentionBackend:
    """Return the backend ``name`` for this device and dtype; ``auto`` takes the fastest usable one.

    With ``documents``, tiles have other shapes in each micro-batch.

    Raises:
        UserError: the backend is unknown, not installed, broken, or cannot take this device or dtype.
    """
    if name == "reference":
        return AttentionBackend("reference", reference.block_forward, reference.block_backward)
    if name == "triton":
        return _triton(device_type, dtype)
    if name not in ("auto", "aten", "cudnn", *VERSIONS):
        raise UserError(
            f"attention_backend is {name!r}, which does not exist; use auto, aten, cudnn, flash_attn_3, flash_attn_4, "
            "triton or reference"
        )
    if device_type == "cpu":
        if name in ("cudnn", *VERSIONS):
            raise UserError(f"attention_backend {name} needs a cuda device and this one is cpu; use auto or aten")
        # The kernel steps over keys by 512, and over queries by 32, or by 64 from 192 on.
        strip = (256, 256) if onednn.is_faster(dtype) else (192, 128)
        strips = Strips(512, *strip, _cpu_strip_forward, _cpu_strip_backward, onednn.suits)
        return AttentionBackend("aten", _aten_cpu_forward, _aten_cpu_backward, strips)
    if dtype not in (torch.bfloat16, torch.float16):
        raise UserError(
            f"attention_backend {name} on {device_type} takes bfloat16 or float16 and got {dtype}; "
            "use --bf16, or --attention-backend reference for a small exact run"
        )
    taken = installed.fastest(installed.gpu(), documents, installed.is_usable) if name == "auto" else name
    if (version := VERSIONS.get(taken)) and (reason := installed.problem(taken)):
        raise UserError(f"attention_backend is {taken}, and {reason}; install {version.install}, or use auto")
    plain, packed = _aten_cuda(None)
    other, other_packed = (plain, packed) if name == "auto" else (None, None)
    if version:
        kernel, own_packed = _aten_cuda(version.impl)
        most = version.widest
        fits = (taken, f"takes heads of up to {most} channels", lambda q, _: q.shape[-1] <= most)
        packs = Packed(*pad_heads(*by_shape(*fits, own_packed, other_packed)))
        return AttentionBackend(taken, *pad_heads(*by_shape(*fits, kernel, other)), packed=packs)
    if taken == "cudnn":
        said = f"takes heads of up to {cudnn.widest()} channels here and more than one key"
        kernel = by_shape("cudnn", said, cudnn.takes, (cudnn.forward, cudnn.backward), other)
        return AttentionBackend("cudnn", *pad_heads(*kernel), packed=_packed())
    return AttentionBackend("aten", *pad_heads(*plain), packed=_packed())


@cache
def _packed() -> Packed:
    return Packed(*pad_heads(*_aten_cuda(None)[1]))


def _aten_cuda(impl: str | None) -> tuple[Kernel, Kernel]:
    """Return aten's flash attention of a tile, and of packed ones, by a version of it; None is FlashAttention 2."""
    forward, backward, packed_forward, packed_backward = installed.by(
        impl, _aten_cuda_forward, _aten_cuda_backward, _aten_packed_forward, _aten_packed_backward
    )
    return (forward, backward), (packed_forward, packed_backward)


def by_shape(
    name: str, said: str, takes: Callable[[Tensor, Tensor], bool], kernel: Kernel, other: Kernel | None
) -> Kernel:
    """Return a forward and a backward that take a kernel where it takes the shape, and elsewhere the other's.

    Raises, when called: UserError, the shape is not this kernel's and there is no other.
    """

    def chosen(q: Tensor, k: Tensor) -> Kernel:
        if takes(q, k):
            return kernel
        if other is None:
            raise UserError(
                f"attention_backend {name} {said}, and these are {q.shape[-1]} channels and {k.shape[1]} keys; use "
                "auto or aten"
            )
        return other

    def chosen_forward(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return chosen(q, k)[0](q, k, *rest)

    def chosen_backward(rows: Rows, keys: Keys, *rest: Any) -> tuple[Tensor, ...]:
        return chosen(rows.q, keys.k)[1](rows, keys, *rest)

    return chosen_forward, chosen_backward


def _triton(device_type: str, dtype: torch.dtype) -> AttentionBackend:
    if not has_triton():
        raise UserError("attention_backend is triton, which is not installed; use auto")
    if device_type == "cpu" and not interpreted():
        raise UserError("attention_backend triton needs a cuda device and this one is cpu; use auto or aten")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(f"attention_backend triton takes no {dtype}; use reference")
    from kernels.triton import tiled

    return AttentionBackend("triton", tiled.forward, tiled.backward, tiled)


def pad_heads(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """Return a kernel's forward and backward for heads of any width, padded to a multiple of 8, which GPUs' take.

    Channels of zeros add nothing to a score; the scale is given and stays.
    """

    def padded_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if not (more := -q.shape[-1] % 8):
            return forward(q, k, v, *rest)
        out, lse = forward(*(F.pad(x, (0, more)) for x in (q, k, v)), *rest)
        return out[..., :-more], lse

    def padded_backward(rows: Rows, keys: Keys, *rest: Any) -> tuple[Tensor, ...]:
        if not (more := -rows.q.shape[-1] % 8):
            return backward(rows, keys, *rest)
        q, dout, out, *columns = (F.pad(x, (0, more)) for x in (*rows[:3], *keys))
        found = backward(Rows(q, dout, out, rows.lse), Keys(*columns), *rest)
        return tuple(x[..., :-more] for x in found)

    return padded_forward, padded_backward


def takes_whole(name: str, device_type: str, dtype: torch.dtype) -> bool:
    """Return whether torch's SDPA takes a whole sequence of this dtype at least as fast as the backend its tiles.

    So it is on a CPU, but for one thread where oneDNN's strips are faster. In bfloat16 it would round partial results.
    """
    return name in ("auto", "aten") and device_type == "cpu" and dtype == torch.float32 and not onednn.is_faster(dtype)


def _is_causal(q: Tensor, k: Tensor, kind: str) -> bool:
    if kind not in (FULL, CAUSAL, ANTI):
        raise ValueError(f"a block of kind {kind!r} does not exist; use {FULL}, {CAUSAL} or {ANTI}")
    if kind != FULL and q.shape[1] != k.shape[1]:
        raise ValueError(f"a block of kind {kind} is square; this one has {q.shape[1]} queries and {k.shape[1]} keys")
    return kind != FULL


def flip_if_anti(kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Reverse the tokens of an ANTI block, there and back."""
    return tuple(x.flip(1) for x in tensors) if kind == ANTI else tensors


def _aten_cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = heads_first(q, k, v)
    out, lse = heads_first(*_cpu_strip_forward(q, k, v, causal, scale, None))
    return out, lse


def _aten_cpu_backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
    rows, keys = Rows(*heads_first(*rows)), Keys(*heads_first(*keys))
    dq, dk, dv = heads_first(*_cpu_strip_backward(rows, keys, causal, scale, None))
    return dq, dk, dv


def _cpu_strip_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Widen bfloat16 first: the kernel would round each partial result, and their sum must be exact.
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    if onednn.suits(q, k):
        return onednn.forward(q, k, v, causal, scale, mask)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_strip_backward(rows: Rows, keys: Keys, causal: bool, scale: float, mask: Tensor | None) -> Gradients:
    wide = torch.promote_types(rows.q.dtype, torch.float32)
    rows, keys = Rows(*(x.to(wide) for x in rows)), Keys(*(x.to(wide) for x in keys))
    if onednn.suits(rows.q, keys.k):
        return onednn.backward(rows, keys, causal, scale, mask)
    q, dout, out, lse = rows
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, *keys, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )


def _aten_cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*heads_first(q, k, v), 0.0, causal, False, scale=scale)
    out, lse = heads_first(out, lse)
    return out, lse


def _aten_cuda_backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
    no_seed = torch.zeros(2, dtype=torch.uint64, device=rows.q.device)  # unused without dropout
    lengths = (rows.q.shape[1], keys.k.shape[1])
    q, dout, out, lse, k, v = heads_first(rows.q, rows.dout, rows.out.to(rows.q.dtype), rows.lse.float(), *keys)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, no_seed, no_seed[:0], scale=scale
    )
    dq, dk, dv = heads_first(dq, dk, dv)
    return dq, dk, dv


def _aten_packed_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    # Flash attention, for cuDNN's backend too, which would pad to the longest.
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
    return out, lse.transpose(0, 1)


def _aten_packed_backward(rows: Rows, keys: Keys, lengths: Lengths, causal: bool, scale: float) -> Gradients:
    q, dout, out, lse = rows
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused without dropout
    lse = lse.float().transpose(0, 1).contiguous()  # [H, R]
    return aten._flash_attention_backward(
        dout, q, *keys, out.to(q.dtype), lse, *lengths, 0.0, causal, no_seed, no_seed[:0], scale=scale
    )
