"""Softmax attention of tiles on a CPU, split into strips for torch's kernel or oneDNN's matmuls.

torch's kernel steps over the keys 512 at a time, and computes all pairs of such a step, hidden or
not. So a larger CAUSAL or ANTI square is first halved until each part fits into one step. It is
then cut into strips, and each strip drops the hidden keys, or queries, at its side. The forward
pass takes strips of rows, each with all the keys that its queries see, so each row's result is
complete at once and needs no merge. The backward pass takes strips of columns, so that dk and dv of
a key are complete at once.

With one thread, if oneDNN is faster on this processor than MKL, which torch's kernel uses,
``kernels.cpu_onednn`` computes the strips.

Shapes as in ``kernels.blocks``. Functions of a strip take heads first: q, dout and out ``[B, H, T,
D]``, k and v ``[B, K, S, D]``, lse ``[B, H, T]``, mask ``[T, S]``, all float32 or wider.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.blocks import CAUSAL, FULL, Gradients, Keys, Rows, Tile, halved, heads_first, merge_
from kernels.cpu_onednn import onednn_backward, onednn_forward, suits, triangle
from runtime.tensors import accum_dtype

aten = torch.ops.aten
Strip = tuple[slice, slice, bool, Tensor | None]
"""Rows and columns of a strip, True if it is causal, and its additive mask or None."""
LARGE = 1 << 16
"""If one head group's q has at least this number of elements, each group is computed by its own
call."""


class Strips(NamedTuple):
    """Sizes, in tokens, by which tiles are cut for the CPU kernel.

    Triangular tiles are halved until they are squares of at most ``square``, the kernel's key block
    size, so that no row is fully masked in a key block. Squares are then cut into strips of
    ``rows`` (forward) or ``columns`` (backward).
    """

    square: int
    rows: int
    columns: int

    def attend_(
        self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Merge the attention of these tiles into running results, in place."""
        out = out.transpose(1, 2)  # [B, H, T, D]
        lse = lse.transpose(1, 2)  # [B, H, T]
        q, k, v = heads_first(q, *keys)
        dtype = accum_dtype(q.dtype)
        for rows, columns, causal, mask in self._strips(q, k, tiles, dtype, by_rows=True):
            for heads, kv_heads in self._head_groups(q[:, :, rows], k[:, :, columns]):
                strip_out, strip_lse = strip_forward(
                    q[:, heads, rows],
                    k[:, kv_heads, columns],
                    v[:, kv_heads, columns],
                    causal,
                    scale,
                    mask,
                )
                total_out = out[:, heads, rows]
                total_lse = lse[:, heads, rows]
                if total_lse.max() == -torch.inf:
                    # The rows have seen no key before: a merge with their empty results would take
                    # twice the time.
                    total_out.copy_(strip_out)
                    total_lse.copy_(strip_lse)
                else:
                    merge_(total_out, total_lse, strip_out, strip_lse)

    def add_gradients_(
        self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place."""
        dq, dk, dv = (x.transpose(1, 2) for x in sums)
        rows = Rows(*heads_first(*rows))
        keys = Keys(*heads_first(*keys))
        strips = self._strips(rows.q, keys.k, tiles, rows.lse.dtype, by_rows=False)
        for tokens, columns, causal, mask in strips:
            for heads, kv_heads in self._head_groups(rows.q[:, :, tokens], keys.k[:, :, columns]):
                row_index = (slice(None), heads, tokens)
                key_index = (slice(None), kv_heads, columns)
                strip_rows = Rows(*(x[row_index] for x in rows))
                strip_keys = Keys(*(x[key_index] for x in keys))
                gradients = strip_backward(strip_rows, strip_keys, causal, scale, mask)
                dq[row_index].add_(gradients[0])
                dk[key_index].add_(gradients[1])
                dv[key_index].add_(gradients[2])

    def _head_groups(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield the query heads to compute in one call, with their key/value heads.

        A kernel's results for all heads are as large as q, so large heads are computed one group at
        a time.
        """
        kv_heads = k.shape[1]
        group_size = q.shape[1] // kv_heads
        if q[:, :group_size].numel() < LARGE or not suits(q[:, :group_size], k[:, :1]):
            yield slice(0, q.shape[1]), slice(None)
            return
        for group in range(kv_heads):
            heads = slice(group_size * group, group_size * (group + 1))
            yield heads, slice(group, group + 1) if kv_heads > 1 else slice(None)

    def _strips(
        self, q: Tensor, k: Tensor, tiles: Sequence[Tile], dtype: torch.dtype, *, by_rows: bool
    ) -> Iterator[Strip]:
        """Yield the strips of the tiles; oneDNN takes a CAUSAL tile whole, however large."""
        for tile in tiles:
            if tile.kind == CAUSAL and suits(q[:, :, tile.q], k[:, :, tile.k]):
                yield tile.q, tile.k, True, None
            else:
                yield from self.cut([tile], dtype, by_rows=by_rows)

    def cut(self, tiles: Sequence[Tile], dtype: torch.dtype, *, by_rows: bool) -> Iterator[Strip]:
        """Yield FULL tiles as they are, and other tiles as strips of rows or of columns."""
        for tile in chain.from_iterable(halved(tile, self.square) for tile in tiles):
            if tile.kind == FULL:
                yield tile.q, tile.k, False, None
                continue
            side = tile.q.stop - tile.q.start
            step = self.rows if by_rows else self.columns
            for start, stop in pairwise(_cuts(side, step)):
                if (tile.kind == CAUSAL) == by_rows:
                    visible = (0, stop)
                else:
                    visible = (start, side)
                rows = (start, stop) if by_rows else visible
                columns = visible if by_rows else (start, stop)

                causal = tile.kind == CAUSAL and rows[0] == columns[0]
                mask = None
                if not causal:
                    square = triangle(tile.kind, self.square, dtype)
                    mask = square[slice(*rows), slice(*columns)]
                yield _shifted(tile.q, rows), _shifted(tile.k, columns), causal, mask


def _cuts(side: int, step: int) -> list[int]:
    """Return the bounds of strips of ``step`` tokens; the last has 0.5 to 1.5 times as many."""
    return [*range(0, max(1, side - step // 2), step), side]


def _shifted(origin: slice, bounds: tuple[int, int]) -> slice:
    return slice(origin.start + bounds[0], origin.start + bounds[1])


def strip_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute out and lse of a strip, in float32 or wider.

    Args:
        causal: query t sees keys 0..t, aligned top left; T may exceed S.
        mask: added to the scores, or None.
    """
    # Convert bfloat16 to float32 first: the kernel would round each partial result, but their sum
    # must be exact.
    dtype = accum_dtype(q.dtype)
    q = q.to(dtype)
    k = k.to(dtype)
    v = v.to(dtype)
    if suits(q, k):
        return onednn_forward(q, k, v, causal, scale, mask)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )


def strip_backward(
    rows: Rows, keys: Keys, causal: bool, scale: float, mask: Tensor | None
) -> Gradients:
    """Compute dq, dk and dv through a strip; arguments as in ``strip_forward``."""
    dtype = accum_dtype(rows.q.dtype)
    rows = Rows(*(x.to(dtype) for x in rows))
    keys = Keys(*(x.to(dtype) for x in keys))
    if suits(rows.q, keys.k):
        return onednn_backward(rows, keys, causal, scale, mask)
    q, dout, out, lse = rows
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, *keys, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
