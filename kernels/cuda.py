"""Wrap kernels of GPU libraries: pack small tiles into one launch, pad heads, and fall back.

A tile of a packed document can be far too small for a GPU, and a launch for each would cost more
than its work. So all CAUSAL and ANTI tiles of a round share one launch, and all FULL ones another,
as the variable-length sequences of FlashAttention. An ANTI tile is a CAUSAL one with its rows and
columns packed last to first. Rows are copied only if they are not in order already.

The results are added to the unpacked tensors in passes. No row and no column appears twice in a
pass, so no two threads add to the same number, and the result does not depend on their order.

Shapes as in ``kernels.attention``. Packed tensors hold the R rows and C columns of all tiles of a
launch: q, dout and out ``[R, H, D]``; k and v ``[C, K, D]``, H a multiple of K; lse ``[R, H]``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.blocks import (
    ANTI,
    FULL,
    Gradients,
    Keys,
    Rows,
    Tile,
    TileNumbers,
    as_numbers,
    in_one_piece,
    merge_,
)
from runtime.errors import UserError
from runtime.tensors import cached_on_device, to_device

Kernel = tuple[Callable[..., Any], Callable[..., Any]]
"""A forward function and its backward function."""
SMALL = 1 << 20
"""Maximum number of pairs of a tile that shares a launch with others.

A larger tile keeps a GPU busy by itself, and is not worth the copy of its rows.
"""

Index = slice | Tensor
"""Selection of rows of a tensor: a slice, or int64 indices."""


class Lengths(NamedTuple):
    """Cumulative lengths of the packed tiles, int32 ``[n + 1]``, and the largest length."""

    rows: Tensor
    columns: Tensor
    max_rows: int
    max_columns: int


class Pass(NamedTuple):
    """Packed rows and columns to add back at once, with their indices in the unpacked tensors."""

    packed_rows: slice
    rows: Index
    packed_columns: slice
    columns: Index


class Launch(NamedTuple):
    """Tiles that a kernel computes in one launch."""

    rows: Index
    columns: Index
    causal: bool
    lengths: Lengths
    passes: tuple[Pass, ...]


def with_fallback(
    name: str,
    limit: str,
    takes: Callable[[Tensor, Tensor], bool],
    kernel: Kernel,
    fallback: Kernel | None,
) -> Kernel:
    """Return a kernel that uses ``fallback`` for shapes that ``kernel`` does not support.

    Args:
        name: the backend, for the message.
        limit: the kernel's limit, for the message: "takes heads of up to 128 channels".
        takes: returns True if ``kernel`` supports (q, k).
        fallback: the other kernel; if None, the returned functions raise UserError instead.
    """

    def kernel_for(q: Tensor, k: Tensor) -> Kernel:
        if takes(q, k):
            return kernel
        if fallback is None:
            raise UserError(
                f"attention_backend {name} {limit}, but got {q.shape[-1]} channels and"
                f" {k.shape[1]} keys; use auto or aten"
            )
        return fallback

    def forward(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        return kernel_for(q, k)[0](q, k, *arguments)

    def backward(rows: Rows, keys: Keys, *arguments: Any) -> tuple[Tensor, ...]:
        return kernel_for(rows.q, keys.k)[1](rows, keys, *arguments)

    return forward, backward


def pad_heads(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """Return a kernel for heads of any width, by padding them to a multiple of 8 channels.

    GPU kernels take only such widths. Channels of zeros add nothing to a score, and the scale is
    an argument, so it does not change.
    """

    def padded_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        padding = -q.shape[-1] % 8
        if not padding:
            return forward(q, k, v, *arguments)
        out, lse = forward(*(F.pad(x, (0, padding)) for x in (q, k, v)), *arguments)
        return out[..., :-padding], lse

    def padded_backward(rows: Rows, keys: Keys, *arguments: Any) -> tuple[Tensor, ...]:
        padding = -rows.q.shape[-1] % 8
        if not padding:
            return backward(rows, keys, *arguments)
        q, dout, out, k, v = (F.pad(x, (0, padding)) for x in (*rows[:3], *keys))
        gradients = backward(Rows(q, dout, out, rows.lse), Keys(k, v), *arguments)
        return tuple(x[..., :-padding] for x in gradients)

    return padded_forward, padded_backward


@dataclass(frozen=True)
class PackedKernel:
    """A kernel that computes many small tiles, packed one after the other, in one launch.

    ``forward`` takes (q, k, v, lengths, causal, scale), and ``backward`` (rows, keys, lengths,
    causal, scale).
    """

    forward: Callable[[Tensor, Tensor, Tensor, Lengths, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Rows, Keys, Lengths, bool, float], Gradients]

    def attend_(
        self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Merge the attention of these tiles into running results, in place.

        ``out`` and ``lse`` are contiguous.
        """
        tile_launches = launches(tiles, q, keys.k)
        q, k, v = (in_one_piece(x).flatten(0, 1) for x in (q, *keys))  # [B T, H, D], [B S, K, D]
        out = out.view(-1, *out.shape[2:])  # [B T, H, D]
        lse = lse.view(-1, *lse.shape[2:])  # [B T, H]
        for launch in tile_launches:
            packed_q = _select(q, launch.rows)
            packed_k = _select(k, launch.columns)
            packed_v = _select(v, launch.columns)
            packed_out, packed_lse = self.forward(
                packed_q, packed_k, packed_v, launch.lengths, launch.causal, scale
            )
            for step in launch.passes:
                rows_out = _select(out, step.rows)
                rows_lse = _select(lse, step.rows)
                merge_(
                    rows_out, rows_lse, packed_out[step.packed_rows], packed_lse[step.packed_rows]
                )
                if not isinstance(step.rows, slice):  # these are copies, not views
                    out.index_copy_(0, step.rows, rows_out)
                    lse.index_copy_(0, step.rows, rows_lse)

    def add_gradients_(
        self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place.

        All three are contiguous.
        """
        tile_launches = launches(tiles, rows.q, keys.k)
        dq, dk, dv = (x.view(-1, *x.shape[2:]) for x in sums)
        flat_rows = [in_one_piece(x).flatten(0, 1) for x in rows]
        flat_keys = [in_one_piece(x).flatten(0, 1) for x in keys]
        for launch in tile_launches:
            packed_rows = Rows(*(_select(x, launch.rows) for x in flat_rows))
            packed_keys = Keys(*(_select(x, launch.columns) for x in flat_keys))
            gradients = self.backward(
                packed_rows, packed_keys, launch.lengths, launch.causal, scale
            )
            for step in launch.passes:
                _add(dq, step.rows, gradients[0][step.packed_rows])
                _add(dk, step.columns, gradients[1][step.packed_columns])
                _add(dv, step.columns, gradients[2][step.packed_columns])


def split_by_size(tiles: Sequence[Tile]) -> tuple[Sequence[Tile], Sequence[Tile]]:
    """Split the tiles into those that share launches and those that each need one."""
    small = []
    large = []
    for tile in tiles:
        if tile.pairs <= SMALL:
            small.append(tile)
        else:
            large.append(tile)
    if len(small) > 1:
        return small, large
    return (), tiles


def launches(tiles: Sequence[Tile], q: Tensor, k: Tensor) -> tuple[Launch, ...]:
    """Pack tiles of queries ``[B, T, ...]`` and keys ``[B, S, ...]`` into launches of a kernel.

    The tiles are the same in each of the B sequences. The result is cached, since all layers, and
    their backward passes, have the same launches.
    """
    return _launches(as_numbers(tiles), *q.shape[:2], k.shape[1], q.device)


@cached_on_device(256)  # a ring has many rounds per micro-batch, each with its own tiles
def _launches(
    tiles: tuple[TileNumbers, ...], batch: int, rows: int, columns: int, device: torch.device
) -> tuple[Launch, ...]:
    squares = []
    rectangles = []
    for tile in tiles:
        if tile[4] == FULL:
            rectangles.append(tile)
        else:
            squares.append(tile)
    return tuple(
        _launch(group, batch, rows, columns, device) for group in (squares, rectangles) if group
    )


def _launch(
    tiles: list[TileNumbers], batch: int, rows: int, columns: int, device: torch.device
) -> Launch:
    # Tiles of all sequences, ordered by pass.
    ordered: list[TileNumbers] = []
    pass_ends = [0]
    for members in _disjoint_passes(tiles, rows, columns):
        for b in range(batch):
            for q0, q1, k0, k1, kind in members:
                q_offset = b * rows
                k_offset = b * columns
                ordered.append((q0 + q_offset, q1 + q_offset, k0 + k_offset, k1 + k_offset, kind))
        pass_ends.append(len(ordered))

    row_runs = [_run(q0, q1, kind) for q0, q1, _, _, kind in ordered]
    column_runs = [_run(k0, k1, kind) for _, _, k0, k1, kind in ordered]
    row_index = np.concatenate(row_runs)
    column_index = np.concatenate(column_runs)
    row_starts = np.cumsum([0, *map(len, row_runs)])
    column_starts = np.cumsum([0, *map(len, column_runs)])

    # Copy everything to the device at once.
    host = [row_starts, column_starts, row_index, column_index]
    joined = to_device(torch.from_numpy(np.concatenate(host)), device)
    device_row_starts, device_column_starts, device_rows, device_columns = joined.split(
        [len(x) for x in host]
    )
    lengths = Lengths(
        device_row_starts.int(),
        device_column_starts.int(),
        max(map(len, row_runs)),
        max(map(len, column_runs)),
    )

    passes = []
    for first, last in pairwise(pass_ends):
        packed_rows = slice(int(row_starts[first]), int(row_starts[last]))
        packed_columns = slice(int(column_starts[first]), int(column_starts[last]))
        passes.append(
            Pass(
                packed_rows,
                _index(row_index, device_rows, packed_rows),
                packed_columns,
                _index(column_index, device_columns, packed_columns),
            )
        )
    everything = slice(0, None)
    return Launch(
        _index(row_index, device_rows, everything),
        _index(column_index, device_columns, everything),
        tiles[0][4] != FULL,
        lengths,
        tuple(passes),
    )


@dataclass
class _Members:
    """Tiles of one pass, with masks of the rows and columns that they use."""

    rows: np.ndarray
    columns: np.ndarray
    tiles: list[TileNumbers] = field(default_factory=list)


def _disjoint_passes(tiles: list[TileNumbers], rows: int, columns: int) -> list[list[TileNumbers]]:
    """Split tiles into passes in which no row and no column appears twice (first fit)."""
    passes: list[_Members] = []
    for tile in tiles:
        q = slice(*tile[:2])
        k = slice(*tile[2:4])
        for members in passes:
            if not members.rows[q].any() and not members.columns[k].any():
                break
        else:
            members = _Members(np.zeros(rows, dtype=bool), np.zeros(columns, dtype=bool))
            passes.append(members)
        members.tiles.append(tile)
        members.rows[q] = True
        members.columns[k] = True
    return [members.tiles for members in passes]


def _run(start: int, stop: int, kind: str) -> np.ndarray:
    if kind == ANTI:
        return np.arange(stop - 1, start - 1, -1)
    return np.arange(start, stop)


def _index(host_index: np.ndarray, device_index: Tensor, part: slice) -> Index:
    """Return the index of these rows: a slice if they are consecutive, which avoids a copy."""
    rows = host_index[part]
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return device_index[part]


def _select(x: Tensor, index: Index) -> Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _add(total: Tensor, index: Index, part: Tensor) -> None:
    if isinstance(index, slice):
        total[index].add_(part)
    else:
        total.index_add_(0, index, part.to(total.dtype))
