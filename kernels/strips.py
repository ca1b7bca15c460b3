"""Tiles for a kernel that computes all that a mask hides within its step over keys, as aten's does on a CPU.

Squares that the kernel does not take whole are halved until one step holds them, and then cut into strips. The forward
takes strips of rows, each with all the keys that its queries see: a row is written once and not merged with itself. The
backward takes strips of columns, so that dk and dv of a key are complete at once.

Shapes as in ``kernels.blocks``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

import torch
from torch import Tensor

from kernels.blocks import CAUSAL, FULL, Gradients, Keys, Rows, Tile, halved
from kernels.merge import merge_

LARGE = 1 << 16
"""Numbers of q that earn a call of their own."""

Part = tuple[slice, slice, bool, Tensor | None]  # rows, columns, causal, mask


@dataclass(frozen=True)
class Strips:
    """A kernel and its sizes, in tokens.

    ``square`` is its step over keys: a row must see some key in each step. ``forward`` and ``backward`` take an
    ``AttentionBackend``'s arguments, with heads before tokens (``heads_first``), and an additive mask ``[T, S]`` or
    None; causal, T may exceed S (aligned top left).
    """

    square: int
    rows: int
    columns: int
    forward: Callable[[Tensor, Tensor, Tensor, bool, float, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[[Rows, Keys, bool, float, Tensor | None], Gradients]
    takes_whole: Callable[[Tensor, Tensor], bool] = lambda q, k: False
    """True if both take a causal square of these q and k as it is, however large, going from head to head."""

    def attend_(self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
        """Fold the attention of these tiles into running results, in place."""
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        q, k, v = heads_first(q, *keys)
        wide = torch.promote_types(q.dtype, torch.float32)
        for rows, columns, causal, mask in self._parts(q, k, tiles, wide, by_rows=True):
            for heads, groups in self._heads(q[:, :, rows], k[:, :, columns]):
                at_keys = k[:, groups, columns], v[:, groups, columns]
                part = self.forward(q[:, heads, rows], *at_keys, causal, scale, mask)
                total = out[:, heads, rows], lse[:, heads, rows]
                if total[1].max() == -torch.inf:  # the rows' first keys: to merge with nothing costs twice the time
                    total[0].copy_(part[0])
                    total[1].copy_(part[1])
                else:
                    merge_(*total, *part)

    def add_gradients_(self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place."""
        dq, dk, dv = (x.transpose(1, 2) for x in sums)
        rows, keys = Rows(*heads_first(*rows)), Keys(*heads_first(*keys))
        for tokens, columns, causal, mask in self._parts(rows.q, keys.k, tiles, rows.lse.dtype, by_rows=False):
            for heads, groups in self._heads(rows.q[:, :, tokens], keys.k[:, :, columns]):
                at_rows, at_keys = (slice(None), heads, tokens), (slice(None), groups, columns)
                blocks = Rows(*(x[at_rows] for x in rows)), Keys(*(x[at_keys] for x in keys))
                parts = self.backward(*blocks, causal, scale, mask)
                dq[at_rows].add_(parts[0])
                dk[at_keys].add_(parts[1])
                dv[at_keys].add_(parts[2])

    def _heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield heads to take together and their groups of keys: what comes back of all heads is as large as q."""
        groups, each = k.shape[1], q.shape[1] // k.shape[1]
        if q[:, :each].numel() < LARGE or not self.takes_whole(q[:, :each], k[:, :1]):
            groups, each = 1, q.shape[1]
        for group in range(groups):
            yield slice(each * group, each * (group + 1)), slice(group, group + 1) if groups > 1 else slice(None)

    def _parts(
        self, q: Tensor, k: Tensor, tiles: Sequence[Tile], dtype: torch.dtype, *, by_rows: bool
    ) -> Iterator[Part]:
        for tile in tiles:
            if tile.kind == CAUSAL and self.takes_whole(q[:, :, tile.q], k[:, :, tile.k]):
                yield tile.q, tile.k, True, None
            else:
                yield from self.parts([tile], dtype, by_rows=by_rows)

    def parts(self, tiles: Sequence[Tile], dtype: torch.dtype, *, by_rows: bool) -> Iterator[Part]:
        """Yield the tiles with their squares cut into strips of rows, or of columns."""
        for tile in chain.from_iterable(halved(tile, self.square) for tile in tiles):
            if tile.kind == FULL:
                yield tile.q, tile.k, False, None
                continue
            side = tile.q.stop - tile.q.start
            for cut in pairwise(_cuts(side, self.rows if by_rows else self.columns)):
                other = (0, cut[1]) if (tile.kind == CAUSAL) == by_rows else (cut[0], side)
                rows, columns = (cut, other) if by_rows else (other, cut)
                causal = tile.kind == CAUSAL and rows[0] == columns[0]
                mask = None if causal else triangle(tile.kind, self.square, dtype)[slice(*rows), slice(*columns)]
                yield _moved(tile.q, rows), _moved(tile.k, columns), causal, mask


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Swap [B, T, H, ...] and [B, H, T, ...], as views; copy only where a head is not contiguous, as kernels need."""
    return tuple(in_one_piece(x).transpose(1, 2) for x in tensors)


def in_one_piece(x: Tensor) -> Tensor:
    """Return x ``[B, T, H, D]`` with contiguous heads, copied if need be; lse ``[B, T, H]`` as it is."""
    return x if x.ndim < 4 or x.stride(-1) == 1 else x.contiguous()


def _cuts(side: int, step: int) -> list[int]:
    """Return where to cut ``side`` tokens into strips of ``step``; the last has half to one and a half of it."""
    return [*range(0, max(1, side - step // 2), step), side]


def _moved(origin: slice, part: tuple[int, int]) -> slice:
    return slice(origin.start + part[0], origin.start + part[1])


@cache
def triangle(kind: str, side: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask ``[side, side]`` of a CAUSAL or ANTI square."""
    seen = torch.ones(side, side, dtype=torch.bool)
    hidden = ~(seen.tril() if kind == CAUSAL else seen.triu())
    return torch.zeros(side, side, dtype=dtype).masked_fill_(hidden, -torch.inf)
