"""Many small tiles packed into one launch of a GPU's kernel; kernels padded to their widths, and
their fallbacks.

A launch of packed tiles takes all CAUSAL and ANTI tiles, another all FULL ones. An ANTI tile is a
CAUSAL one whose rows and columns are packed last to first. Rows are copied only if they do not lie
in order already. Results go back in passes: no row and no column appears twice in a pass, so
nothing depends on the order in which a device's threads add.

Shapes as in ``kernels.attention``; packed, R rows and C columns of all tiles of a launch: q, dout,
out ``[R, H, D]``; k and v ``[C, K, D]``, H a multiple of K; lse ``[R, H]``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""A forward and its backward."""
SMALL = 1 << 20
"""Most pairs of a tile that shares a launch; a larger one keeps a device busy alone, and copies no
rows.
"""

Index = slice | Tensor  # int64


class Lengths(NamedTuple):
    """Starts of packed tiles: int32 ``[n + 1]``, 0 first and the total last; and the most rows and
    columns of one.
    """

    rows: Tensor
    columns: Tensor
    most_rows: int
    most_columns: int


class Pass(NamedTuple):
    """A part of the packed rows and columns, and where it lies in the tensors."""

    packed_rows: slice
    rows: Index
    packed_columns: slice
    columns: Index


class Launch(NamedTuple):
    """Tiles that a kernel takes at once."""

    rows: Index
    columns: Index
    causal: bool
    lengths: Lengths
    passes: tuple[Pass, ...]


def with_fallback(
    name: str,
    said: str,
    takes: Callable[[Tensor, Tensor], bool],
    kernel: Kernel,
    other: Kernel | None,
) -> Kernel:
    """Return a forward and a backward that take a kernel where it takes the shape, and elsewhere
    the other's.

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


def pad_heads(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """Return a kernel's forward and backward for heads of any width, padded to a multiple of 8,
    which GPUs' take.

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


@dataclass(frozen=True)
class Packed:
    """A kernel: forward (q, k, v, lengths, causal, scale), and backward (rows, keys, lengths,
    causal, scale).
    """

    forward: Callable[[Tensor, Tensor, Tensor, Lengths, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Rows, Keys, Lengths, bool, float], Gradients]

    def attend_(
        self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Fold the attention of these tiles into running results, in place; ``out`` and ``lse`` are
        contiguous.
        """
        made = launches(tiles, q, keys.k)
        q, k, v = (in_one_piece(x).flatten(0, 1) for x in (q, *keys))
        out, lse = (x.view(-1, *x.shape[2:]) for x in (out, lse))
        for launch in made:
            blocks = _select(q, launch.rows), _select(k, launch.columns), _select(v, launch.columns)
            part, part_lse = self.forward(*blocks, launch.lengths, launch.causal, scale)
            for step in launch.passes:
                rows_out, rows_lse = _select(out, step.rows), _select(lse, step.rows)
                merge_(rows_out, rows_lse, part[step.packed_rows], part_lse[step.packed_rows])
                if not isinstance(step.rows, slice):
                    out.index_copy_(0, step.rows, rows_out)
                    lse.index_copy_(0, step.rows, rows_lse)

    def add_gradients_(
        self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place; they are contiguous."""
        made = launches(tiles, rows.q, keys.k)
        dq, dk, dv = (x.view(-1, *x.shape[2:]) for x in sums)
        flat_rows, flat_keys = (
            [in_one_piece(x).flatten(0, 1) for x in given] for given in (rows, keys)
        )
        for launch in made:
            packed_rows = Rows(*(_select(x, launch.rows) for x in flat_rows))
            packed_keys = Keys(*(_select(x, launch.columns) for x in flat_keys))
            parts = self.backward(packed_rows, packed_keys, launch.lengths, launch.causal, scale)
            for step in launch.passes:
                _add(dq, step.rows, parts[0][step.packed_rows])
                _add(dk, step.columns, parts[1][step.packed_columns])
                _add(dv, step.columns, parts[2][step.packed_columns])


def split_by_size(tiles: Sequence[Tile]) -> tuple[Sequence[Tile], Sequence[Tile]]:
    """Return the tiles that share launches, and those that take one each."""
    small = [tile for tile in tiles if tile.pairs <= SMALL]
    return (
        (small, [tile for tile in tiles if tile.pairs > SMALL]) if len(small) > 1 else ((), tiles)
    )


def launches(tiles: Sequence[Tile], q: Tensor, k: Tensor) -> tuple[Launch, ...]:
    """Pack the tiles of queries ``[B, T, ...]`` and keys ``[B, S, ...]``, the same in each of the
    sequences.

    What was made is kept: all layers, and their backward, ask for the same.
    """
    return _launches(as_numbers(tiles), *q.shape[:2], k.shape[1], q.device)


@cached_on_device(
    256
)  # each round of a micro-batch asks for its own, up to as many as there are ranks
def _launches(
    tiles: tuple[TileNumbers, ...], batch: int, rows: int, columns: int, device: torch.device
) -> tuple[Launch, ...]:
    groups = (
        [tile for tile in tiles if tile[4] != FULL],
        [tile for tile in tiles if tile[4] == FULL],
    )
    return tuple(_launch(group, batch, rows, columns, device) for group in groups if group)


def _launch(
    tiles: list[TileNumbers], batch: int, rows: int, columns: int, device: torch.device
) -> Launch:
    passes = [
        [
            (q0 + b * rows, q1 + b * rows, k0 + b * columns, k1 + b * columns, kind)
            for b in range(batch)
            for q0, q1, k0, k1, kind in members
        ]
        for members in _apart(tiles, rows, columns)
    ]
    ordered = [tile for members in passes for tile in members]
    by_row = [_run(q0, q1, kind) for q0, q1, _, _, kind in ordered]
    by_column = [_run(k0, k1, kind) for _, _, k0, k1, kind in ordered]
    row_starts, column_starts = (np.cumsum([0, *map(len, runs)]) for runs in (by_row, by_column))
    host = [row_starts, column_starts, np.concatenate(by_row), np.concatenate(by_column)]
    moved = to_device(torch.from_numpy(np.concatenate(host)), device).split(
        [len(x) for x in host]
    )  # one copy
    lengths = Lengths(
        moved[0].int(), moved[1].int(), max(map(len, by_row)), max(map(len, by_column))
    )
    ends = np.cumsum([0, *map(len, passes)])
    steps = []
    for first, last in pairwise(ends):
        part = slice(int(row_starts[first]), int(row_starts[last]))
        other = slice(int(column_starts[first]), int(column_starts[last]))
        steps.append(
            Pass(part, _index(host[2], moved[2], part), other, _index(host[3], moved[3], other))
        )
    everything = slice(0, None)
    return Launch(
        _index(host[2], moved[2], everything),
        _index(host[3], moved[3], everything),
        tiles[0][4] != FULL,
        lengths,
        tuple(steps),
    )


def _apart(tiles: list[TileNumbers], rows: int, columns: int) -> list[list[TileNumbers]]:
    """Split tiles into passes in which no row and no column appears twice."""
    passes: list[
        tuple[list[TileNumbers], np.ndarray, np.ndarray]
    ] = []  # members, rows and columns in use
    for tile in tiles:
        q, k = slice(*tile[:2]), slice(*tile[2:4])
        found = next(
            (some for some in passes if not some[1][q].any() and not some[2][k].any()), None
        )
        if found is None:
            found = [], np.zeros(rows, dtype=bool), np.zeros(columns, dtype=bool)
            passes.append(found)
        found[0].append(tile)
        found[1][q] = found[2][k] = True
    return [members for members, _, _ in passes]


def _run(start: int, stop: int, kind: str) -> np.ndarray:
    return np.arange(stop - 1, start - 1, -1) if kind == ANTI else np.arange(start, stop)


def _index(host: np.ndarray, moved: Tensor, part: slice) -> Index:
    """Return what selects these rows: a slice if they lie in order, so that nothing is copied."""
    found = host[part]
    if (np.diff(found) == 1).all():
        return slice(int(found[0]), int(found[-1]) + 1)
    return moved[part]


def _select(x: Tensor, index: Index) -> Tensor:
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _add(total: Tensor, index: Index, part: Tensor) -> None:
    if isinstance(index, slice):
        total[index].add_(part)
    else:
        total.index_add_(0, index, part.to(total.dtype))
