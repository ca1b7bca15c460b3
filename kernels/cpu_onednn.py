"""Softmax attention of a strip with oneDNN's matmuls, for one CPU thread.

Queries are processed in blocks of ROWS, and each block's keys in steps of COLUMNS. A block of
scores stays in the L2 cache while it is computed, exponentiated and used. This is for large strips,
on processors on which oneDNN is faster than MKL, which torch's kernel uses (``kernels.operators``).

Exponentials are computed as powers of two, because torch's ``exp``, which is MKL's too, takes four
times as long as its ``exp2`` on AMD's processors. So the queries are scaled by log2(e) first, and
lse is scaled back at the end.

Several steps over keys are merged by their maxima and sums (the log-sum-exp merge): with the
maximum m_i, the sum s_i and the product p_i of step i, and m the largest m_i, out is
sum(2^(m_i - m) p_i) / sum(2^(m_i - m) s_i). Only differences from the largest are exponentiated, so
nothing overflows.

Shapes: q, dout and out ``[B, H, T, D]``, k and v ``[B, K, S, D]``, lse ``[B, H, T]``, mask ``[T,
S]``, all float32.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product as pairs

import torch
from torch import Tensor

from kernels import operators
from kernels.blocks import CAUSAL, Gradients, Keys, Rows
from kernels.operators import product
from runtime.tensors import accum_dtype

ROWS = 192
"""Number of queries in a block.

A matmul sums its rows one after the other in float32. With more queries in a block, the keys'
gradients would differ by more than rounding explains (tests/parallel/context/test_executor.py). The
forward pass does not sum over queries, so its blocks may have more.
"""
COLUMNS = 7 * 192
"""Number of keys in a step."""
MAX_SCORES = 1 << 18
"""Maximum number of scores in a block; they take 1 MiB."""
MIN_WORK = 1 << 22
"""Minimum number of scores times head channels; below it, the overhead of the calls exceeds the
time of the matmuls."""
MIN_WIDTH = 32
"""Minimum number of channels of a head with which oneDNN is faster."""
GRAIN = 64
"""If the rows and columns of strips are multiples of this number, few distinct shapes occur.

oneDNN compiles a matmul for every new shape, which takes 0.5 ms, and keeps the last 1,024 of them,
0.7 GB at most.
"""
WORTH_COMPILING = 1_000_000
"""Minimum number of scores (of all heads) that makes a strip of any other shape worth compiling.

Packed short documents stay below it, whatever their lengths.
"""
LOG2_E = math.log2(math.e)


def is_faster(dtype: torch.dtype) -> bool:
    """Return True if oneDNN is faster than torch's kernel for large strips of this dtype.

    The strips' results are float32 or wider. With several threads oneDNN is slower: torch's kernel
    gives each thread some heads, but these matmuls would synchronize the threads after every
    operator.
    """
    single_thread = torch.get_num_threads() == 1
    return operators.ONEDNN and single_thread and accum_dtype(dtype) == torch.float32


def suits(q: Tensor, k: Tensor) -> bool:
    """Return True if a strip of these q and k (float32 or wider) should use oneDNN's matmuls."""
    rows, width = q.shape[2:]
    columns = k.shape[2]
    recurs = rows % GRAIN == 0 and columns % GRAIN == 0
    if not recurs and q.shape[:3].numel() * columns < WORTH_COMPILING:
        return False
    if width < MIN_WIDTH:
        return False
    return rows * columns * width >= MIN_WORK and is_faster(q.dtype)


@cache
def triangle(kind: str, side: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask ``[side, side]`` of a CAUSAL or ANTI square."""
    ones = torch.ones(side, side, dtype=torch.bool)
    visible = ones.tril() if kind == CAUSAL else ones.triu()
    return torch.zeros(side, side, dtype=dtype).masked_fill_(~visible, -torch.inf)


def onednn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute out and lse of the queries over these keys.

    Args:
        causal: query t sees keys 0..t, aligned top left; T may exceed S.
        mask: added to the scores, or None.
    """
    batch, heads, rows, width = q.shape
    columns = k.shape[2]
    out = q.new_empty(batch, rows, heads, width).transpose(1, 2)  # [B, H, T, D]
    lse = q.new_empty(batch, heads, rows)
    block_rows = ROWS
    if not causal:
        block_rows = max(ROWS, MAX_SCORES // min(columns, COLUMNS) // GRAIN * GRAIN)
    blocks = list(_blocks(rows, columns, causal, block_rows))
    hide = _mask(causal, mask, q.dtype)

    for b, h, kv_head in _heads(q, k):
        head_q = (q[b, h] * (scale * LOG2_E)).contiguous()  # [T, D]
        head_k = k[b, kv_head].contiguous()  # [S, D]
        # If the rows of v are not contiguous, a matmul takes a thousand times as long.
        head_v = v[b, kv_head].contiguous().t()  # [D, S]
        for row_slice, column_slices in blocks:
            maxima = list[Tensor]()
            sums = list[Tensor]()
            products = list[Tensor]()
            for column_slice in column_slices:
                scores = product(head_q[row_slice], head_k[column_slice])  # [rows, columns]
                hide(scores, row_slice, column_slice)
                maxima.append(scores.amax(1, keepdim=True))
                weights = scores.sub_(maxima[-1]).exp2_()
                sums.append(weights.sum(1, keepdim=True))
                products.append(product(weights, head_v[:, column_slice]))  # [rows, D]

            total = products[0]
            total_max = maxima[0]
            total_sum = sums[0]
            if len(column_slices) > 1:
                step_maxima = torch.stack(maxima)  # [steps, rows, 1]
                total_max = step_maxima.amax(0)
                step_weights = step_maxima.sub_(total_max).exp2_()
                total_sum = torch.stack(sums).mul_(step_weights).sum(0)
                total = torch.stack(products).mul_(step_weights).sum(0)
            torch.div(total, total_sum, out=out[b, h, row_slice])
            log2_sum = total_sum.log_()[:, 0]
            torch.add(log2_sum, total_max[:, 0], alpha=1 / LOG2_E, out=lse[b, h, row_slice])
    return out, lse


def onednn_backward(
    rows: Rows, keys: Keys, causal: bool, scale: float, mask: Tensor | None
) -> Gradients:
    """Compute dq, dk and dv through these keys; arguments as in ``onednn_forward``.

    Blocks of scores are transposed, ``[keys, queries]``. Then a query's lse, and its sum of
    dout * out, are biases of a matmul, which oneDNN adds without another pass.
    """
    q, dout, out, lse = rows
    k, v = keys
    batch, heads, tokens, width = q.shape
    kv_heads, columns = k.shape[1:3]
    dq = q.new_empty(batch, tokens, heads, width).transpose(1, 2)  # [B, H, T, D]
    dk = q.new_zeros(batch, columns, kv_heads, width).transpose(1, 2)  # [B, K, S, D]
    dv = q.new_zeros(batch, columns, kv_heads, width).transpose(1, 2)
    negative_lse = (lse * -LOG2_E).contiguous()  # [B, H, T]
    negative_delta = (dout * out).sum(-1).neg_().contiguous()  # [B, H, T]
    blocks = list(_blocks(tokens, columns, causal))
    hide = _mask(causal, mask, q.dtype, transposed=True)

    for b, h, kv_head in _heads(q, k):
        head_q = (q[b, h] * (scale * LOG2_E)).contiguous()  # [T, D]
        head_dout = dout[b, h].contiguous()
        head_k = k[b, kv_head].contiguous()  # [S, D]
        head_v = v[b, kv_head].contiguous()
        head_dk = torch.zeros_like(head_k)
        head_dv = torch.zeros_like(head_v)
        for row_slice, column_slices in blocks:
            block_q = head_q[row_slice]  # [rows, D]
            block_dout = head_dout[row_slice]
            block_lse = negative_lse[b, h, row_slice]  # [rows]
            block_delta = negative_delta[b, h, row_slice]
            block_dq = q.new_zeros(width, 1)  # transposed: [D, rows]
            for column_slice in column_slices:
                block_k = head_k[column_slice]  # [columns, D]
                weights = product(block_k, block_q, block_lse)  # [columns, rows]
                hide(weights, column_slice, row_slice)
                weights.exp2_()
                head_dv[column_slice].add_(product(weights, block_dout.t()))
                dscores = product(head_v[column_slice], block_dout, block_delta).mul_(weights)
                head_dk[column_slice].add_(product(dscores, block_q.t()))
                block_dq = product(block_k.t(), dscores.t()).add_(block_dq)
            torch.mul(block_dq.t(), scale, out=dq[b, h, row_slice])
        dk[b, kv_head].add_(head_dk, alpha=1 / LOG2_E)  # head_q was scaled by log2(e)
        dv[b, kv_head].add_(head_dv)
    return dq, dk, dv


def _blocks(
    rows: int, columns: int, causal: bool, block_rows: int = ROWS
) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of rows, each with the steps over its visible keys.

    All but the last block and step have the same shape, for which oneDNN compiles once.
    """
    for start in range(0, rows, block_rows):
        stop = min(start + block_rows, rows)
        end = min(stop, columns) if causal else columns
        steps = [slice(first, min(first + COLUMNS, end)) for first in range(0, end, COLUMNS)]
        yield slice(start, stop), steps


def _mask(
    causal: bool, mask: Tensor | None, dtype: torch.dtype, transposed: bool = False
) -> Callable[[Tensor, slice, slice], None]:
    """Return a function that masks the hidden scores of a block, given its rows and columns.

    With ``transposed`` the scores are ``[columns, rows]``, and the function takes columns and rows.
    """
    if causal:
        mask = triangle(CAUSAL, ROWS, dtype)
    if mask is not None and transposed:
        mask = mask.t().contiguous()  # adding a view would take three times as long

    def hide(scores: Tensor, first: slice, second: slice) -> None:
        if mask is None:
            return
        if not causal:
            scores.add_(mask[first, second])
            return
        rows = second if transposed else first
        columns = first if transposed else second
        if columns.stop > rows.start:  # the block ends on the diagonal
            visible = max(0, rows.start - columns.start)  # columns before the diagonal
            corner = scores[visible:] if transposed else scores[:, visible:]
            corner.add_(mask[: corner.shape[0], : corner.shape[1]])

    return hide


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield each sequence and query head, with the key/value head that it uses."""
    for b, h in pairs(range(q.shape[0]), range(q.shape[1])):
        yield b, h, h * k.shape[1] // q.shape[1]
