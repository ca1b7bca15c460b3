"""Softmax attention of tiles on a CPU: squares cut into strips, each by torch's kernel or by
oneDNN's products.

torch's kernel computes all that a mask hides within its step over keys. So squares that it does not
take whole are halved until one step holds them, and then cut into strips. The forward takes strips
of rows, each with all the keys that its queries see: a row is written once and not merged with
itself. The backward takes strips of columns, so that dk and dv of a key are complete at once.

oneDNN's products take large strips where they are faster than MKL's in torch's kernel. A block of
scores stays in the second cache while it is made, exponentiated and used. Exponentials are powers
of two: torch's ``exp`` is MKL's too, and takes four times as long as its ``exp2`` on AMD's
processors.

Shapes as in ``kernels.blocks``; of functions of a strip q, dout and out ``[B, H, T, D]``, k and v
``[B, K, S, D]``, lse ``[B, H, T]``, mask ``[T, S]``, all float32 or wider.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from itertools import product as pairs
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import operators
from kernels.blocks import CAUSAL, FULL, Gradients, Keys, Rows, Tile, halved, heads_first, merge_
from kernels.operators import product
from runtime.tensors import accum_dtype

aten = torch.ops.aten
Part = tuple[slice, slice, bool, Tensor | None]  # rows, columns, causal, mask
LARGE = 1 << 16
"""Numbers of q that earn a call of their own."""
ROWS, WIDE, BLOCK = 192, 7 * 192, 1 << 18
"""Queries, keys and most scores of a block: 1 MiB. A product sums one after the other: gradients of
keys that sum more queries at once are off by more than one process's
(tests/parallel/context/test_executor.py). A forward sums none."""
LEAST_WORK = 1 << 22
"""Scores times channels of a head below which Python's calls take longer than what they call."""
NARROWEST = 32
"""Channels of a head below which there is nothing to gain."""
GRAIN, EARNED = 64, 1_000_000
"""Rows and columns that are multiples of the first come again. oneDNN compiles each other shape,
0.5 ms a product, and keeps the last 1,024, 0.7 GB at most: scores of all heads below the second, as
of short documents of any lengths, do not earn that."""
LOG2_E = math.log2(math.e)


class Strips(NamedTuple):
    """Sizes of strips, in tokens; ``square`` is the kernel's step over keys, in each of which a row
    must see some.
    """

    square: int
    rows: int
    columns: int

    def attend_(
        self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Fold the attention of these tiles into running results, in place."""
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        q, k, v = heads_first(q, *keys)
        wide = accum_dtype(q.dtype)
        for rows, columns, causal, mask in self._parts(q, k, tiles, wide, by_rows=True):
            for heads, groups in self._heads(q[:, :, rows], k[:, :, columns]):
                at_keys = k[:, groups, columns], v[:, groups, columns]
                part = strip_forward(q[:, heads, rows], *at_keys, causal, scale, mask)
                total = out[:, heads, rows], lse[:, heads, rows]
                if (
                    total[1].max() == -torch.inf
                ):  # the rows' first keys: to merge with nothing costs twice the time
                    total[0].copy_(part[0])
                    total[1].copy_(part[1])
                else:
                    merge_(*total, *part)

    def add_gradients_(
        self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place."""
        dq, dk, dv = (x.transpose(1, 2) for x in sums)
        rows, keys = Rows(*heads_first(*rows)), Keys(*heads_first(*keys))
        for tokens, columns, causal, mask in self._parts(
            rows.q, keys.k, tiles, rows.lse.dtype, by_rows=False
        ):
            for heads, groups in self._heads(rows.q[:, :, tokens], keys.k[:, :, columns]):
                at_rows, at_keys = (slice(None), heads, tokens), (slice(None), groups, columns)
                blocks = Rows(*(x[at_rows] for x in rows)), Keys(*(x[at_keys] for x in keys))
                parts = strip_backward(*blocks, causal, scale, mask)
                dq[at_rows].add_(parts[0])
                dk[at_keys].add_(parts[1])
                dv[at_keys].add_(parts[2])

    def _heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield heads to take together and their groups of keys: what comes back of all heads is as
        large as q.
        """
        groups, each = k.shape[1], q.shape[1] // k.shape[1]
        if q[:, :each].numel() < LARGE or not suits(q[:, :each], k[:, :1]):
            groups, each = 1, q.shape[1]
        for group in range(groups):
            yield (
                slice(each * group, each * (group + 1)),
                slice(group, group + 1) if groups > 1 else slice(None),
            )

    def _parts(
        self, q: Tensor, k: Tensor, tiles: Sequence[Tile], dtype: torch.dtype, *, by_rows: bool
    ) -> Iterator[Part]:
        for tile in tiles:
            if tile.kind == CAUSAL and suits(
                q[:, :, tile.q], k[:, :, tile.k]
            ):  # from head to head, however large
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
                mask = (
                    None
                    if causal
                    else triangle(tile.kind, self.square, dtype)[slice(*rows), slice(*columns)]
                )
                yield _moved(tile.q, rows), _moved(tile.k, columns), causal, mask


def _cuts(side: int, step: int) -> list[int]:
    """Return where to cut ``side`` tokens into strips of ``step``; the last has half to one and a
    half of it.
    """
    return [*range(0, max(1, side - step // 2), step), side]


def _moved(origin: slice, part: tuple[int, int]) -> slice:
    return slice(origin.start + part[0], origin.start + part[1])


@cache
def triangle(kind: str, side: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask ``[side, side]`` of a CAUSAL or ANTI square."""
    seen = torch.ones(side, side, dtype=torch.bool)
    hidden = ~(seen.tril() if kind == CAUSAL else seen.triu())
    return torch.zeros(side, side, dtype=dtype).masked_fill_(hidden, -torch.inf)


def strip_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a strip, whose additive ``mask`` may be None; causal, T may exceed S
    (aligned top left).
    """
    # Widen bfloat16 first: the kernel would round each partial result, and their sum must be exact.
    wide = accum_dtype(q.dtype)
    q, k, v = (x.to(wide) for x in (q, k, v))
    if suits(q, k):
        return onednn_forward(q, k, v, causal, scale, mask)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )


def strip_backward(
    rows: Rows, keys: Keys, causal: bool, scale: float, mask: Tensor | None
) -> Gradients:
    """Return dq, dk and dv through a strip; arguments as of ``strip_forward``."""
    wide = accum_dtype(rows.q.dtype)
    rows, keys = Rows(*(x.to(wide) for x in rows)), Keys(*(x.to(wide) for x in keys))
    if suits(rows.q, keys.k):
        return onednn_backward(rows, keys, causal, scale, mask)
    q, dout, out, lse = rows
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, *keys, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )


def is_faster(dtype: torch.dtype) -> bool:
    """Return whether large strips of q, k and v of this dtype are faster here; their results are
    float32 or wider.

    With several threads they are not: torch's kernel gives each its heads, and these would meet
    after every operator.
    """
    alone = torch.get_num_threads() == 1
    return operators.ONEDNN and alone and accum_dtype(dtype) == torch.float32


def suits(q: Tensor, k: Tensor) -> bool:
    """Return whether oneDNN's products take a strip of these q and k, float32 or wider, rather than
    torch's kernel.
    """
    rows, width, columns = *q.shape[2:], k.shape[2]
    earned = not (rows % GRAIN or columns % GRAIN) or q.shape[:3].numel() * columns >= EARNED
    if not earned or width < NARROWEST:
        return False
    return rows * columns * width >= LEAST_WORK and is_faster(q.dtype)


def onednn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the queries over these keys; arguments as of ``strip_forward``, in
    float32.
    """
    (batch, heads, rows, width), columns = q.shape, k.shape[2]
    out = q.new_empty(batch, rows, heads, width).transpose(1, 2)
    lse = q.new_empty(batch, heads, rows)
    most_rows = ROWS if causal else max(ROWS, BLOCK // min(columns, WIDE) // GRAIN * GRAIN)
    blocks = list(_blocks(rows, columns, causal, most_rows))
    hide = _mask(causal, mask, q.dtype)
    for b, h, group in _heads(q, k):
        queries, keys = (q[b, h] * (scale * LOG2_E)).contiguous(), k[b, group].contiguous()
        values = (
            v[b, group].contiguous().t()
        )  # with gaps between its rows a product takes a thousand times as long
        for at, seen in blocks:
            most, total, parts = list[Tensor](), list[Tensor](), list[Tensor]()
            for to in seen:
                scores = product(queries[at], keys[to])
                hide(scores, at, to)
                most.append(scores.amax(1, keepdim=True))
                total.append(scores.sub_(most[-1]).exp2_().sum(1, keepdim=True))
                parts.append(product(scores, values[:, to]))
            largest, summed = most[0], total[0]
            if len(seen) > 1:
                levels = torch.stack(most)
                largest = levels.amax(0)
                weights = levels.sub_(largest).exp2_()
                summed = torch.stack(total).mul_(weights).sum(0)
                parts[0] = torch.stack(parts).mul_(weights).sum(0)
            torch.div(parts[0], summed, out=out[b, h, at])
            torch.add(summed.log_()[:, 0], largest[:, 0], alpha=1 / LOG2_E, out=lse[b, h, at])
    return out, lse


def onednn_backward(
    rows: Rows, keys: Keys, causal: bool, scale: float, mask: Tensor | None
) -> Gradients:
    """Return dq, dk and dv through these keys.

    Blocks have keys before queries, so that a row's lse, and its sum of dout * out, are biases,
    which oneDNN adds on its way.
    """
    q, dout, out, lse = rows
    k, v = keys
    (batch, heads, tokens, width), (groups, columns) = q.shape, k.shape[1:3]
    dq = q.new_empty(batch, tokens, heads, width).transpose(1, 2)
    dk, dv = (q.new_zeros(batch, columns, groups, width).transpose(1, 2) for _ in range(2))
    less_lse, less_sums = (lse * -LOG2_E).contiguous(), (dout * out).sum(-1).neg_().contiguous()
    blocks = list(_blocks(tokens, columns, causal))
    hide = _mask(causal, mask, q.dtype, transposed=True)
    for b, h, group in _heads(q, k):
        queries, grads = (q[b, h] * (scale * LOG2_E)).contiguous(), dout[b, h].contiguous()
        own_keys, values = k[b, group].contiguous(), v[b, group].contiguous()
        into_keys, into_values = torch.zeros_like(own_keys), torch.zeros_like(values)
        for at, seen in blocks:
            queries_here, grads_here = queries[at], grads[at]
            lse_here, sums_here = less_lse[b, h, at], less_sums[b, h, at]
            into_queries = q.new_zeros(width, 1)
            for to in seen:
                keys_here = own_keys[to]
                weights = product(keys_here, queries_here, lse_here)  # [S, T]
                hide(weights, to, at)
                weights.exp2_()
                into_values[to].add_(product(weights, grads_here.t()))
                scores = product(values[to], grads_here, sums_here).mul_(weights)
                into_keys[to].add_(product(scores, queries_here.t()))
                into_queries = product(keys_here.t(), scores.t()).add_(into_queries)
            torch.mul(into_queries.t(), scale, out=dq[b, h, at])
        dk[b, group].add_(into_keys, alpha=1 / LOG2_E)
        dv[b, group].add_(into_values)
    return dq, dk, dv


def _blocks(
    rows: int, columns: int, causal: bool, most_rows: int = ROWS
) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of rows, each with those of the keys that it sees; of few shapes, but for the
    last.
    """
    for start in range(0, rows, most_rows):
        stop = min(start + most_rows, rows)
        last = min(stop, columns) if causal else columns
        yield slice(start, stop), [slice(to, min(to + WIDE, last)) for to in range(0, last, WIDE)]


def _mask(
    causal: bool, mask: Tensor | None, dtype: torch.dtype, transposed: bool = False
) -> Callable[[Tensor, slice, slice], None]:
    """Return what hides scores of a block, given its rows and columns, or its columns and rows."""
    if causal:
        mask = triangle(CAUSAL, ROWS, dtype)
    if mask is not None and transposed:
        mask = mask.t().contiguous()  # to add rows to columns takes three times as long

    def hide(scores: Tensor, first: slice, second: slice) -> None:
        rows, columns = (second, first) if transposed else (first, second)
        if mask is not None and not causal:
            scores.add_(mask[first, second])
        elif mask is not None and columns.stop > rows.start:  # the block ends on the diagonal
            skipped = max(0, rows.start - columns.start)
            corner = scores[skipped:] if transposed else scores[:, skipped:]
            corner.add_(mask[: corner.shape[0], : corner.shape[1]])

    return hide


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield each sequence and head, with its group of keys."""
    for b, h in pairs(range(q.shape[0]), range(q.shape[1])):
        yield b, h, h * k.shape[1] // q.shape[1]
