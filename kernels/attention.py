"""Attention of one block or a list of tiles, forward and backward, and the choice of a backend.

Blocks are FULL, CAUSAL or ANTI (``kernels.blocks``). CAUSAL and ANTI ones are always square, since
kernels disagree on how to align the diagonal of a rectangle. With its tokens reversed, an ANTI
block is a CAUSAL one, so it needs no kernel of its own. A backend never gets a row whose keys are
all masked.

Shapes: q ``[B, T, H, D]``, k and v ``[B, S, K, D]`` with H a multiple of K, lse ``[B, T, H]``
float32 or wider.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kernels import cpu_onednn
from kernels.backends import SOFTMAX, listed
from kernels.backends.base import AttentionKernel, Backend
from kernels.blocks import ANTI, CAUSAL, FULL, Gradients, Keys, Rows, Tile, merge_
from kernels.cuda import split_by_size
from kernels.gpu import Gpu, gpu
from runtime.errors import UserError


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float, backend: AttentionKernel
) -> tuple[Tensor, Tensor]:
    """Compute the attention of one block, with a backend that computes single tiles.

    Returns:
        out ``[B, T, H, D]`` (on a GPU in the inputs' dtype, else float32 or wider) and lse ``[B, T,
        H]``.
    """
    assert backend.forward is not None
    causal = _is_causal(q, k, kind)
    q, k, v = flip_if_anti(kind, q, k, v)
    out, lse = backend.forward(q, k, v, causal, scale)
    out, lse = flip_if_anti(kind, out, lse)
    return out, lse


def block_backward(
    rows: Rows, keys: Keys, kind: str, scale: float, backend: AttentionKernel
) -> Gradients:
    """Compute dq, dk and dv through one block of pairs; dtypes as in ``block_forward``."""
    assert backend.backward is not None
    causal = _is_causal(rows.q, keys.k, kind)
    rows = Rows(*flip_if_anti(kind, *rows))
    keys = Keys(*flip_if_anti(kind, *keys))
    gradients = backend.backward(rows, keys, causal, scale)
    dq, dk, dv = flip_if_anti(kind, *gradients)
    return dq, dk, dv


def empty_results(rows: Sequence[int], q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return results for ``rows`` ([B, T, H]) that have seen no key yet: out is 0, lse is -inf."""
    out = torch.zeros(*rows, q.shape[3], dtype=dtype, device=q.device)  # [B, T, H, D]
    lse = torch.full(tuple(rows), float("-inf"), dtype=dtype, device=q.device)  # [B, T, H]
    return out, lse


def only_block(
    tiles: Sequence[Tile], rows: int, columns: int | None, backend: AttentionKernel
) -> Tile | None:
    """Return the only tile, if it covers all rows (and all columns, if these are given); else None.

    The caller can then use the kernel's output directly instead of adding it to zeros. The result
    is also None for backends that take lists of tiles: they add to running results themselves.
    """
    if backend.tiled is not None or len(tiles) != 1 or tiles[0].q != slice(0, rows):
        return None
    if columns is not None and tiles[0].k != slice(0, columns):
        return None
    return tiles[0]


def attend_tiles_(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    keys: Keys,
    tiles: Sequence[Tile],
    scale: float,
    backend: AttentionKernel,
) -> None:
    """Merge the attention of these tiles into running results, in place.

    Args:
        out, lse: results over earlier keys, float32 or wider; lse is -inf for a row that has seen
            no key.
    """
    if backend.tiled is not None:
        backend.tiled.attend_(out, lse, q, keys, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = split_by_size(tiles)
        if small:
            backend.packed.attend_(out, lse, q, keys, small, scale)
    for tile in tiles:
        tile_q = q[:, tile.q]
        tile_k = keys.k[:, tile.k]
        tile_v = keys.v[:, tile.k]
        tile_out, tile_lse = block_forward(tile_q, tile_k, tile_v, tile.kind, scale, backend)
        merge_(out[:, tile.q], lse[:, tile.q], tile_out, tile_lse)


def add_gradients_(
    sums: Gradients,
    rows: Rows,
    keys: Keys,
    tiles: Sequence[Tile],
    scale: float,
    backend: AttentionKernel,
) -> None:
    """Add the gradients through these tiles to running sums (float32 or wider), in place."""
    if backend.tiled is not None:
        backend.tiled.add_gradients_(sums, rows, keys, tiles, scale)
        return
    if backend.packed is not None:
        small, tiles = split_by_size(tiles)
        if small:
            backend.packed.add_gradients_(sums, rows, keys, small, scale)
    dq, dk, dv = sums
    for tile in tiles:
        tile_rows = Rows(*(x[:, tile.q] for x in rows))
        tile_keys = Keys(*(x[:, tile.k] for x in keys))
        gradients = block_backward(tile_rows, tile_keys, tile.kind, scale, backend)
        dq[:, tile.q].add_(gradients[0])
        dk[:, tile.k].add_(gradients[1])
        dv[:, tile.k].add_(gradients[2])


@cache
def select_backend(
    name: str, device_type: str, dtype: torch.dtype, is_packed: bool = False
) -> AttentionKernel:
    """Return the kernel of backend ``name`` for this device and dtype.

    ``auto`` takes the fastest usable backend. With ``is_packed`` it skips backends that compile for
    each shape, since tiles then have different shapes in each micro-batch.

    Raises:
        UserError: the backend is unknown, not installed, broken, or cannot take this device or
            dtype.
    """
    general = SOFTMAX["aten"]
    if name == "auto":
        backend = automatic_backend(device_type, gpu(), is_packed)
    elif name in SOFTMAX:
        backend = SOFTMAX[name]
    else:
        raise UserError(f"attention_backend {name!r} does not exist; use {listed(SOFTMAX)}")
    refusal = backend.refusal(name, device_type, dtype)
    if refusal:
        raise UserError(refusal)

    fallback = None
    if name == "auto" and backend is not general:
        fallback = general.softmax_kernel(device_type, dtype, None)
    return backend.softmax_kernel(device_type, dtype, fallback)


def automatic_backend(device_type: str, this_gpu: Gpu, is_packed: bool) -> Backend:
    """Return the softmax attention backend that ``auto`` chooses."""
    if device_type != "cpu":
        for backend in SOFTMAX.values():
            if backend.is_automatic(this_gpu, is_packed):
                return backend
    return SOFTMAX["aten"]


def takes_whole(name: str, device_type: str, dtype: torch.dtype) -> bool:
    """Return True if torch's SDPA of a whole sequence is at least as fast as tiles.

    True for float32 on a CPU, unless the oneDNN kernel is faster, which needs a single thread. In
    bfloat16 SDPA would round partial results, so tiles are used.
    """
    return (
        name in ("auto", "aten")
        and device_type == "cpu"
        and dtype == torch.float32
        and not cpu_onednn.is_faster(dtype)
    )


def _is_causal(q: Tensor, k: Tensor, kind: str) -> bool:
    if kind not in (FULL, CAUSAL, ANTI):
        raise ValueError(f"a block of kind {kind!r} does not exist; use {FULL}, {CAUSAL} or {ANTI}")
    if kind != FULL and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"a block of kind {kind} must be square, but this one has {q.shape[1]} queries and"
            f" {k.shape[1]} keys; give as many keys as queries"
        )
    return kind != FULL


def flip_if_anti(kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Reverse the tokens if the block is ANTI; a second call reverses the results back."""
    if kind != ANTI:
        return tensors
    return tuple(x.flip(1) for x in tensors)
