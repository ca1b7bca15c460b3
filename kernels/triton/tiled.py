"""Launches of the tiles' kernels (``kernels.triton.attention``): a list of tiles in one each.

Shapes as in ``kernels.blocks``; D up to 256, bfloat16, float16 or, slowly, float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows, Tile, as_numbers
from kernels.strips import in_one_piece
from kernels.triton import attention, interpreted
from kernels.triton.work import work_of
from runtime.errors import UserError


class Blocking(NamedTuple):
    """Rows and columns of a step, and launch options."""

    ROWS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


EXACT = Blocking(16, 16, 4, 1)
"""In float32, without tensor cores; larger ones take minutes to compile."""
BLOCKINGS = {
    ("forward", 80): {64: Blocking(128, 64, 4, 3), 128: Blocking(128, 64, 8, 2), 256: Blocking(64, 64, 8, 2)},
    ("rows", 80): {64: Blocking(128, 64, 8, 2), 128: Blocking(64, 64, 8, 2), 256: Blocking(64, 32, 8, 2)},
    ("columns", 80): {64: Blocking(64, 128, 8, 2), 128: Blocking(64, 64, 8, 2), 256: Blocking(32, 64, 8, 2)},
    ("forward", 90): {64: Blocking(128, 128, 8, 3), 128: Blocking(128, 128, 8, 2), 256: Blocking(128, 64, 8, 2)},
    ("rows", 90): {64: Blocking(128, 64, 8, 3), 128: Blocking(128, 64, 8, 2), 256: Blocking(64, 64, 8, 2)},
    ("columns", 90): {64: Blocking(64, 128, 8, 2), 128: Blocking(64, 128, 8, 2), 256: Blocking(32, 64, 8, 2)},
}
"""By kernel and compute capability, from which on, and by width, up to which."""
SMALLER = (86, 89, 120, 121)
"""Capabilities of GPUs with 99 KiB of shared memory for a block: they take the sizes of 80, up to width 128."""


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, 90 for 9.0; the interpreter has the smallest."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


def blocking_of(kernel: str, q: Tensor) -> Blocking:
    """Return sizes and options that fit the registers and the shared memory of q's device."""
    level = capability(q.device)
    most = 128 if level in SMALLER else 256
    if q.shape[-1] > most:
        raise UserError(
            f"attention_backend triton takes heads of up to {most} channels on this device, and these are "
            f"{q.shape[-1]}; use --attention-backend auto"
        )
    if q.dtype == torch.float32:
        return EXACT
    by_width = BLOCKINGS[kernel, 90 if level >= 90 and level not in SMALLER else 80]
    return by_width[next(width for width in by_width if q.shape[-1] <= width)]


def attend_(out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
    """Fold the attention of these tiles into running results, in place; ``out`` and ``lse`` are contiguous."""
    _check_contiguous(out, lse)
    if not tiles:
        return
    q, k, v = map(in_one_piece, (q, *keys))
    blocking = blocking_of("forward", q)
    blocks, entries = work_of(as_numbers(tiles), blocking.ROWS, True, q.device)
    grid = (len(blocks) // 4, q.shape[0] * q.shape[2])
    given = q, k, v, out, lse, blocks, entries, scale, _strides(q, k, v), q.shape[1]
    attention.forward_kernel[grid](*given, **_shared(q, k), **blocking._asdict())


def add_gradients_(sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
    """Add the gradients through these tiles to (dq, dk, dv), in place; they are contiguous."""
    _check_contiguous(*sums)
    if not tiles:
        return
    numbers = as_numbers(tiles)
    q, dout, k, v = map(in_one_piece, (rows.q, rows.dout, *keys))
    out, lse = rows.out.contiguous(), rows.lse.contiguous()
    dq, dk, dv = sums
    level, delta = lse.new_empty(2, q.shape[0], q.shape[2], q.shape[1])
    shared, strides = _shared(q, k), _strides(q, k, v, dout)
    blocking = blocking_of("rows", q)
    blocks, entries = work_of(numbers, blocking.ROWS, True, q.device)
    grid = (len(blocks) // 4, q.shape[0] * q.shape[2])
    given: tuple[Any, ...] = q, k, v, dout, out, lse, level, delta, dq, blocks, entries, scale, strides, q.shape[1]
    attention.rows_kernel[grid](*given, **shared, **blocking._asdict())
    blocking = blocking_of("columns", q)
    blocks, entries = work_of(numbers, blocking.COLUMNS, False, q.device)
    grid = (len(blocks) // 4, k.shape[0] * k.shape[2])
    given = q, k, v, dout, level, delta, dk, dv, blocks, entries, scale, strides, q.shape[1], k.shape[1]
    attention.columns_kernel[grid](*given, **shared, **blocking._asdict())


def _shared(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the last arguments of every kernel."""
    width = q.shape[3]
    return {
        "H": q.shape[2],
        "group": q.shape[2] // k.shape[2],
        "D": width,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "WIDEN": interpreted(),
    }


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _check_contiguous(*totals: Tensor) -> None:
    for x in totals:
        if not x.is_contiguous():
            raise ValueError(f"attention_backend triton adds to contiguous tensors, and one has strides {x.stride()}")
