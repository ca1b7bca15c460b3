"""Attention of blocks, one or a list of tiles, forward and backward: the backends and their selection.

Shapes: q ``[B, T, H, D]``, k and v ``[B, S, K, D]`` with H a multiple of K, lse ``[B, T, H]`` float32 or wider.
Blocks are FULL, CAUSAL or ANTI (``kernels.blocks``); the last two are always square, since kernels disagree on how to
align a rectangle. Reversed along tokens, an ANTI block is a CAUSAL one, so it needs no kernel. Never pass a backend a
fully masked row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kernels import cpu, cuda, installed, reference
from kernels.blocks import ANTI, CAUSAL, FULL, Gradients, Keys, Rows, Tile, merge_
from kernels.cpu import Strips
from kernels.cuda import Packed, pad_heads, split_by_size, with_fallback
from kernels.triton import has_triton, interpreted
from runtime.errors import UserError

VERSIONS = installed.VERSIONS


class Tiled(Protocol):
    """A kernel that takes lists of tiles by itself; arguments and results as of ``attend_tiles_``."""

    def attend_(self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
        """Fold the attention of these tiles into running results, in place."""

    def add_gradients_(self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place."""


@dataclass(frozen=True)
class AttentionBackend:
    """A forward (q, k, v, causal, scale) -> (out, lse) and its backward, or ``tiled`` in their place.

    ``tiled`` takes all tiles at once, ``packed`` the small ones; the others are taken one by one.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]] | None = None
    backward: Callable[[Rows, Keys, bool, float], Gradients] | None = None
    tiled: Tiled | None = None
    packed: Packed | None = None


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float, backend: AttentionBackend
) -> tuple[Tensor, Tensor]:
    """Compute attention of the queries to these keys only, by a backend that takes tiles one by one.

    Returns:
        out ``[B, T, H, D]`` (on a GPU in the inputs' dtype, else float32 or wider) and lse ``[B, T, H]``.
    """
    assert backend.forward is not None
    causal = _is_causal(q, k, kind)
    q, k, v = flip_if_anti(kind, q, k, v)
    out, lse = flip_if_anti(kind, *backend.forward(q, k, v, causal, scale))
    return out, lse


def block_backward(rows: Rows, keys: Keys, kind: str, scale: float, backend: AttentionBackend) -> Gradients:
    """Compute the gradients through this block; dtypes as in ``block_forward``."""
    assert backend.backward is not None
    causal = _is_causal(rows.q, keys.k, kind)
    rows, keys = Rows(*flip_if_anti(kind, *rows)), Keys(*flip_if_anti(kind, *keys))
    dq, dk, dv = flip_if_anti(kind, *backend.backward(rows, keys, causal, scale))
    return dq, dk, dv


def empty_results(rows: Sequence[int], q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the results over no key of rows ``[B, T, H]``: out ``[B, T, H, D]`` of 0 and lse of -inf."""
    out = torch.zeros(*rows, q.shape[3], dtype=dtype, device=q.device)
    return out, torch.full(tuple(rows), float("-inf"), dtype=dtype, device=q.device)


def only_block(tiles: Sequence[Tile], rows: int, columns: int | None, backend: AttentionBackend) -> Tile | None:
    """Return the tile if it is the only one and has all rows, and all columns if these are given.

    What its kernel returns is then the sum of all tiles: to add it to zeros would only move memory. None also for a
    backend that takes lists of tiles, which continues from results.
    """
    if backend.tiled is not None or len(tiles) != 1 or tiles[0].q != slice(0, rows):
        return None
    return tiles[0] if columns is None or tiles[0].k == slice(0, columns) else None


def attend_tiles_(
    out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float, backend: AttentionBackend
) -> None:
    """Fold the attention of these tiles into running results, in place.

    Args:
        out, lse: results over earlier keys, float32 or wider; lse is -inf for a row without any.
    """
    if backend.tiled is not None:
        backend.tiled.attend_(out, lse, q, keys, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = split_by_size(tiles)
        if small:
            backend.packed.attend_(out, lse, q, keys, small, scale)
    for tile in tiles:
        part = block_forward(q[:, tile.q], keys.k[:, tile.k], keys.v[:, tile.k], tile.kind, scale, backend)
        merge_(out[:, tile.q], lse[:, tile.q], *part)


def add_gradients_(
    sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float, backend: AttentionBackend
) -> None:
    """Add the gradients through these tiles to the sums so far, float32 or wider, in place."""
    if backend.tiled is not None:
        backend.tiled.add_gradients_(sums, rows, keys, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = split_by_size(tiles)
        if small:
            backend.packed.add_gradients_(sums, rows, keys, small, scale)
    for tile in tiles:
        blocks = Rows(*(x[:, tile.q] for x in rows)), Keys(*(x[:, tile.k] for x in keys))
        parts = block_backward(*blocks, tile.kind, scale, backend)
        for total, part, at in zip(sums, parts, (tile.q, tile.k, tile.k), strict=True):
            total[:, at].add_(part)


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
        strip = (256, 256) if cpu.is_faster(dtype) else (192, 128)
        return AttentionBackend("aten", tiled=Strips(512, *strip))
    if dtype not in (torch.bfloat16, torch.float16):
        raise UserError(
            f"attention_backend {name} on {device_type} takes bfloat16 or float16 and got {dtype}; "
            "use --bf16, or --attention-backend reference for a small exact run"
        )
    taken = installed.fastest(installed.gpu(), documents) if name == "auto" else name
    if (version := VERSIONS.get(taken)) and (reason := installed.problem(taken)):
        raise UserError(f"attention_backend is {taken}, and {reason}; install {version.install}, or use auto")
    plain, packed = cuda.flash(None)
    other, other_packed = (plain, packed) if name == "auto" else (None, None)
    if version:
        kernel, own_packed = cuda.flash(version.impl)
        most = version.widest
        fits = (taken, f"takes heads of up to {most} channels", lambda q, _: q.shape[-1] <= most)
        packs = Packed(*pad_heads(*with_fallback(*fits, own_packed, other_packed)))
        return AttentionBackend(taken, *pad_heads(*with_fallback(*fits, kernel, other)), packed=packs)
    if taken == "cudnn":
        said = f"takes heads of up to {cuda.widest_cudnn()} channels here and more than one key"
        kernel = with_fallback("cudnn", said, cuda.takes_cudnn, (cuda.cudnn_forward, cuda.cudnn_backward), other)
        return AttentionBackend("cudnn", *pad_heads(*kernel), packed=Packed(*pad_heads(*packed)))
    return AttentionBackend("aten", *pad_heads(*plain), packed=Packed(*pad_heads(*packed)))


def _triton(device_type: str, dtype: torch.dtype) -> AttentionBackend:
    if not has_triton():
        raise UserError("attention_backend is triton, which is not installed; use auto")
    if device_type == "cpu" and not interpreted():
        raise UserError("attention_backend triton needs a cuda device and this one is cpu; use auto or aten")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(f"attention_backend triton takes no {dtype}; use reference")
    from kernels.triton import attention

    return AttentionBackend("triton", tiled=attention)


def takes_whole(name: str, device_type: str, dtype: torch.dtype) -> bool:
    """Return whether torch's SDPA takes a whole sequence of this dtype at least as fast as the backend its tiles.

    So it is on a CPU, but for one thread where oneDNN's strips are faster. In bfloat16 it would round partial results.
    """
    return name in ("auto", "aten") and device_type == "cpu" and dtype == torch.float32 and not cpu.is_faster(dtype)


def _is_causal(q: Tensor, k: Tensor, kind: str) -> bool:
    if kind not in (FULL, CAUSAL, ANTI):
        raise ValueError(f"a block of kind {kind!r} does not exist; use {FULL}, {CAUSAL} or {ANTI}")
    if kind != FULL and q.shape[1] != k.shape[1]:
        raise ValueError(f"a block of kind {kind} is square; this one has {q.shape[1]} queries and {k.shape[1]} keys")
    return kind != FULL


def flip_if_anti(kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Reverse the tokens of an ANTI block, there and back."""
    return tuple(x.flip(1) for x in tensors) if kind == ANTI else tensors
