"""Gated delta rule of one slice, which takes its state from the slice before it.

After an exchange of heads among all ranks, a rank has all tokens of the slice for some heads, so a
state stays on its rank. The convolution before the rule keeps its tokens, and reads the last rows
of the rank or of the slice before.

Shapes: B sequences, N tokens of this rank in the slice, U ranks, X channels, K key heads of width
D, H value heads of width E, R rows before a token that the convolution reads.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.ops import causal_convolution, delta_rule
from parallel.context.layout import ContextError, can_split
from parallel.context.ops import heads_to_tokens, tokens_to_heads
from parallel.context.plan import PLANS, Plan, PlanHandle
from parallel.context.slices.layer import Slice
from parallel.context.transport import HeadExchange
from runtime.tensors import accum_dtype

STATE = "state"
ROWS = "rows"


class SliceDelta:
    """The functions that a delta rule layer calls, for slices; differentiable, collective."""

    def __init__(
        self,
        whole: Any,
        exchange: HeadExchange,
        handle: PlanHandle,
        backend: str = "auto",
    ) -> None:
        """Choose the functions for calls without slices.

        Args:
            whole: the layer's functions for whole sequences, as for ``model.parts.delta``.
            exchange: the ranks that split the heads, all ranks of a sequence.
            handle: the plan of slices that have no mask of their own.
            backend: as for ``kernels.ops.delta_rule``.

        Raises:
            ContextError: the ranks do not share each slice in blocks.
        """
        layout = PLANS[handle.tensor].layout.name
        if layout != "contiguous":
            raise ContextError(
                f"context_parallel_layout is {layout}, but a delta rule in slices needs blocks of "
                "consecutive tokens, joined by an exchange of heads; set it to contiguous"
            )
        self._whole = whole
        self._exchange = exchange
        self._handle = handle
        self._backend = backend

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None
    ) -> Tensor:
        """Return the delta rule of a slice, ``[B, N, H, E]``.

        Args:
            q, k: ``[B, N, K, D]``.
            v: ``[B, N, H, E]``.
            g: ``[B, N, H]`` or ``[B, N, H, D]``.
            beta: ``[B, N, H]``.
            mask: the slice; other masks go to the function for whole sequences.

        Raises:
            ContextError: the ranks cannot split the heads.
        """
        if not isinstance(mask, Slice):
            return self._on_whole(self._whole, q, k, v, g, beta, mask)
        exchange = self._exchange
        plan = self._plan(mask)
        self._check_heads(v.shape[2], k.shape[2])
        first, end = mask.positions(len(exchange.ranks))

        state = None
        if first and first not in plan.boundaries:
            state = mask.take(STATE)
        q, k, v = (tokens_to_heads(exchange, x) for x in (q, k, v))
        g = tokens_to_heads(exchange, g.view(*g.shape[:3], -1)).view(*q.shape[:2], -1, *g.shape[3:])
        beta = tokens_to_heads(exchange, beta[..., None])[..., 0]
        cu_seqlens = _documents(plan, first, end)
        out, final = delta_rule(
            q, k, v, g, beta, state, cu_seqlens=cu_seqlens, backend=self._backend
        )
        if mask.end < mask.total and end not in plan.boundaries:
            mask.hand_on(STATE, final)
        return heads_to_tokens(exchange, out)

    def convolve(self, x: Tensor, weight: Tensor, mask: Any = None) -> Tensor:
        """Return the causal convolution ``[B, N, X]`` of a slice.

        Args:
            x: ``[B, N, X]``.
            weight: ``[X, R + 1]``; the last number of each row is for the token itself.
            mask: as for the rule.
        """
        if not isinstance(mask, Slice):
            return self._on_whole(self._whole.convolve, x, weight, mask)
        exchange = self._exchange
        plan = self._plan(mask)
        ranks = len(exchange.ranks)
        rank = exchange.ranks.index(exchange.transport.rank)
        count = weight.shape[1] - 1
        length = x.shape[1]

        # The rows before this rank's tokens, and those before the next slice: the last ones of all
        # rows that come before.
        ends = x[:, max(0, length - count) :]
        ends_by_rank = _RowsOfRanks.apply(ends, exchange) if ranks > 1 else ends[None]
        parts = [x.new_zeros(x.shape[0], count, x.shape[2])]
        if mask.number:
            parts.append(mask.take(ROWS))
        halo = torch.cat((*parts, *ends_by_rank), 1)
        if mask.end < mask.total:
            mask.hand_on(ROWS, halo[:, halo.shape[1] - count :])
        later = (ranks - rank) * ends.shape[1]
        rows = halo[:, : halo.shape[1] - later][:, -count:] if count else halo[:, :0]

        start = mask.positions(ranks)[0] + rank * length
        rows = _of_document(rows, start - _document_start(plan, start))
        return causal_convolution(x, weight, rows, _documents(plan, start, start + length))

    def _check_heads(self, heads: int, key_heads: int) -> None:
        ranks = len(self._exchange.ranks)
        if not can_split(heads, key_heads, ranks):
            raise ContextError(
                f"attend_delta: {ranks} ranks share each slice, but cannot split {key_heads} key "
                f"and {heads} value heads; use a number of ranks that divides them"
            )

    def _plan(self, piece: Slice) -> Plan:
        handle = self._handle if piece.mask is None else piece.mask
        return PLANS[handle.tensor]

    def _on_whole(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        layout = PLANS[self._handle.tensor].geometry.layout
        if layout.needs_slices or layout.size > 1:
            raise ContextError(
                "attend_delta: the plan's tokens lie in slices, but the mask is no slice; pass a "
                "Slice, or make the plan without slice_len"
            )
        return function(*arguments)


def _documents(plan: Plan, first: int, end: int) -> tuple[int, ...] | None:
    """Return the cumulative lengths of the documents' parts in positions ``first`` to ``end``."""
    begin = bisect_right(plan.boundaries, first)
    inside = []
    for boundary in plan.boundaries[begin:]:
        if boundary >= end:
            break
        inside.append(boundary - first)
    return (0, *inside, end - first) if inside else None


def _document_start(plan: Plan, position: int) -> int:
    """Return the first position of the document at ``position``."""
    number = bisect_right(plan.boundaries, position)
    return plan.boundaries[number - 1] if number else 0


def _of_document(rows: Tensor, count: int) -> Tensor:
    """Return rows ``[B, R, X]`` with zeros before the last ``count``, those of a document."""
    padding = rows.shape[1] - count
    if padding <= 0:
        return rows
    return torch.cat((torch.zeros_like(rows[:, :padding]), rows[:, padding:]), 1)


class _RowsOfRanks(torch.autograd.Function):
    """All-gather of a few rows of every rank: [B, R, X] -> [U, B, R, X]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        copies = rows.expand(len(exchange.ranks), *rows.shape)
        return exchange.transport.exchange(copies, exchange.ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        gradients = exchange.transport.exchange(gradient, exchange.ranks)
        total = gradients.sum(0, dtype=accum_dtype(gradient.dtype))
        return total.to(gradient.dtype), None
