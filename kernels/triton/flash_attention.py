"""Softmax attention of a list of tiles in one launch, with Triton: work division and launches.

The kernels are in ``kernels.triton.flash_kernels``. A round of context parallelism may have
hundreds of tiles (packed documents, windows, a ring's halves). One launch takes them all: a list on
the device has, for each block of rows or of columns, the tiles that touch it. The blocks with the
most work come first, so that no long one is left at the end.

Shapes as in ``kernels.blocks``. D is up to 256; bfloat16, float16 or, slowly, float32. out, lse,
dq, dk and dv are contiguous; in other tensors only the channels of a head must be contiguous.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows, Tile, as_numbers, in_one_piece
from kernels.triton import interpreted
from kernels.triton.flash_kernels import columns_kernel, forward_kernel, rows_kernel
from kernels.triton.work import work_of
from runtime.errors import UserError


class AttentionBlocking(NamedTuple):
    """Rows and columns of a block of scores, and launch options."""

    ROWS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


EXACT = AttentionBlocking(16, 16, 4, 1)
"""Blocking for float32, without tensor cores; larger blocks take minutes to compile."""
BLOCKINGS = {
    ("forward", 80): {
        64: AttentionBlocking(128, 64, 4, 3),
        128: AttentionBlocking(128, 64, 8, 2),
        256: AttentionBlocking(64, 64, 8, 2),
    },
    ("rows", 80): {
        64: AttentionBlocking(128, 64, 8, 2),
        128: AttentionBlocking(64, 64, 8, 2),
        256: AttentionBlocking(64, 32, 8, 2),
    },
    ("columns", 80): {
        64: AttentionBlocking(64, 128, 8, 2),
        128: AttentionBlocking(64, 64, 8, 2),
        256: AttentionBlocking(32, 64, 8, 2),
    },
    ("forward", 90): {
        64: AttentionBlocking(128, 128, 8, 3),
        128: AttentionBlocking(128, 128, 8, 2),
        256: AttentionBlocking(128, 64, 8, 2),
    },
    ("rows", 90): {
        64: AttentionBlocking(128, 64, 8, 3),
        128: AttentionBlocking(128, 64, 8, 2),
        256: AttentionBlocking(64, 64, 8, 2),
    },
    ("columns", 90): {
        64: AttentionBlocking(64, 128, 8, 2),
        128: AttentionBlocking(64, 128, 8, 2),
        256: AttentionBlocking(32, 64, 8, 2),
    },
}
"""Blockings, keyed by kernel and minimum compute capability, then by maximum head width."""
SMALLER = (86, 89, 120, 121)
"""Compute capabilities of GPUs with 99 KiB of shared memory per block.

They use the sizes of capability 80, up to a head width of 128.
"""


def capability(device: torch.device) -> int:
    """Return a GPU's compute capability, such as 90 for 9.0; the interpreter counts as 80."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def blocking_of(kernel: str, q: Tensor) -> AttentionBlocking:
    """Return the blocking that fits the registers and shared memory of q's device."""
    level = capability(q.device)
    width = q.shape[-1]
    max_width = 128 if level in SMALLER else 256
    if width > max_width:
        raise UserError(
            f"attention_backend triton takes heads of up to {max_width} channels on this device,"
            f" but these have {width}; use --attention-backend auto"
        )
    if q.dtype == torch.float32:
        return EXACT
    min_level = 90 if level >= 90 and level not in SMALLER else 80
    by_width = BLOCKINGS[kernel, min_level]
    return by_width[next(limit for limit in by_width if width <= limit)]


def attend_(
    out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
) -> None:
    """Merge the attention of these tiles into running results, in place.

    ``out`` and ``lse`` are contiguous.
    """
    _check_contiguous(out, lse)
    if not tiles:
        return
    q, k, v = map(in_one_piece, (q, *keys))
    tokens = q.shape[1]
    blocking = blocking_of("forward", q)
    blocks, entries = work_of(as_numbers(tiles), blocking.ROWS, True, q.device)
    grid = (len(blocks) // 4, q.shape[0] * q.shape[2])
    forward_kernel[grid](
        q, k, v, out, lse, blocks, entries, scale, _strides(q, k, v), tokens,
        **_shared(q, k), **blocking._asdict(),
    )  # fmt: skip


def add_gradients_(
    sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
) -> None:
    """Add the gradients through these tiles to (dq, dk, dv), in place; all three are contiguous."""
    _check_contiguous(*sums)
    if not tiles:
        return
    numbers = as_numbers(tiles)
    q, dout, k, v = map(in_one_piece, (rows.q, rows.dout, *keys))
    out = rows.out.contiguous()
    lse = rows.lse.contiguous()
    dq, dk, dv = sums
    batch, tokens, heads, _ = q.shape
    level, delta = lse.new_empty(2, batch, heads, tokens)
    shared = _shared(q, k)
    strides = _strides(q, k, v, dout)

    blocking = blocking_of("rows", q)
    blocks, entries = work_of(numbers, blocking.ROWS, True, q.device)
    grid = (len(blocks) // 4, batch * heads)
    rows_kernel[grid](
        q, k, v, dout, out, lse, level, delta, dq, blocks, entries, scale, strides, tokens,
        **shared, **blocking._asdict(),
    )  # fmt: skip

    blocking = blocking_of("columns", q)
    blocks, entries = work_of(numbers, blocking.COLUMNS, False, q.device)
    grid = (len(blocks) // 4, k.shape[0] * k.shape[2])
    columns_kernel[grid](
        q, k, v, dout, level, delta, dk, dv, blocks, entries, scale, strides, tokens, k.shape[1],
        **shared, **blocking._asdict(),
    )  # fmt: skip


def _shared(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the keyword arguments that all kernels share."""
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
            raise ValueError(
                "attention_backend triton adds its results only to contiguous tensors, but one of "
                f"them has strides {x.stride()}; call contiguous() on it"
            )
