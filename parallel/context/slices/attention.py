"""Softmax attention of one slice to the keys of its own and of earlier slices.

Keys and values stay on their rank after the exchange of heads, so each travels once in a pass. The
backward pass stores the keys of all slices first; the slices that then run forward again reuse
them, and send only queries and outputs. If the heads are not split among all ranks, a rank has the
keys of some tokens. It then attends for the queries of a slice on all ranks, its team.

Shapes: B sequences, N tokens of this rank in the slice, H query heads, G key heads, U ranks that
split the heads. q ``[B, N, H, D]``, k and v ``[B, N, G, D]``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.attention import (
    add_gradients_,
    attend_tiles_,
    block_forward,
    empty_results,
    only_block,
)
from kernels.blocks import Rows, sinks_gradient
from parallel.context.executor import EXECUTORS, Executor
from parallel.context.layout import ContextError, Window
from parallel.context.ops import windowed_plan
from parallel.context.slices.layer import SLICES, KeysStoredError, Slice
from parallel.context.transport import HEAD_EXCHANGES, HeadExchange
from runtime.tensors import accum_dtype, differentiable

AttendHeads = Callable[[Tensor, Tensor | None, float], Tensor]
"""Attention of a rank's heads: queries ``[B, U N, H / U, D]``, sinks ``[H / U]`` and the factor of
the scores -> output like the queries."""


def attend_slice(
    executor: Executor,
    exchange: HeadExchange,
    piece: Slice,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    window: Window | None,
) -> AttendHeads:
    """Return the attention of one slice to its own and earlier slices; differentiable, collective.

    Arguments as in ``SoftmaxAttention``.

    Raises:
        ContextError: the method sends keys from rank to rank.
        KeysStoredError: only the keys are needed, and they are stored now.
        SliceOrderError: in the backward pass, if the slice after this one has not run back.
    """
    geometry = executor.geometry
    if len(exchange.ranks) * len(geometry.teammates(executor.rank)) != geometry.size:
        raise ContextError(
            f"attend: a slice's keys have to stay on their rank, but {geometry.method.name} sends "
            "them from rank to rank; use method ulysses or allgather_q, or leave out "
            "layer_chunk_size"
        )
    if piece.keys_only:
        _store(exchange, piece, k, v)
        raise KeysStoredError

    def attention(queries: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
        # The slice keeps no handle, which would keep the slice and all keys alive in turn.
        handles = (executor.handle, exchange.handle, SLICES.tensor(piece), plan)
        out, _ = torch.ops.longmesh.slice_attention(
            queries, k, v, sinks, scale, *handles, list(window or ())
        )
        return out

    return attention


def _store(exchange: HeadExchange, piece: Slice, k: Tensor, v: Tensor) -> None:
    """Send the keys and values of a slice to the ranks of their heads, and store them."""
    ranks = len(exchange.ranks)
    keys, values = (exchange.to_heads(x.detach()) for x in (k, v))  # [B, U N, G / U, D]
    piece.memory.store_keys(ranks * piece.first, keys, values, ranks * piece.total)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Any,
    scale: float,
    handle: int,
    exchange_handle: int,
    slice_handle: Tensor,
    plan_handle: Tensor,
    window: Any,
) -> tuple[Tensor, Tensor]:
    executor = EXECUTORS[handle]
    exchange = HEAD_EXCHANGES[exchange_handle]
    piece = SLICES[slice_handle]
    memory = piece.memory
    plan = windowed_plan(plan_handle, window, executor)
    gather_queries = executor.gather_team((q,))
    if not memory.has_all_keys:
        _store(exchange, piece, k, v)
    keys = memory.keys
    assert keys is not None

    first, end = piece.positions(executor.geometry.size)
    tiles = plan.slice_tiles(executor.rank, first, end)
    backend = executor.kernel(plan, q)
    dtype = accum_dtype(q.dtype)
    (queries,) = gather_queries()  # [B, end - first, H / U, D]
    tile = only_block(tiles, end - first, None, backend)
    if tile:
        tile_k, tile_v = (x[:, tile.k] for x in keys)
        out, lse = block_forward(queries, tile_k, tile_v, tile.kind, scale, backend)
    else:
        out, lse = empty_results(queries.shape[:3], queries, dtype)
        if lse.device.type == "cpu":
            lse = lse.double()  # as in the executor: merges would round it
        attend_tiles_(out, lse, queries, keys, tiles, scale, backend)
    if executor.has_team or sinks is not None:
        out = out.to(dtype)
    out, lse = executor.combine(out, lse.to(dtype), sinks)
    return out.to(q.dtype), lse


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=accum_dtype(q.dtype))


def _backward(dout: Tensor, _: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, scale, *handles, window = arguments
    executor = EXECUTORS[handles[0]]
    exchange = HEAD_EXCHANGES[handles[1]]
    piece = SLICES[handles[2]]
    memory = piece.memory
    plan = windowed_plan(handles[3], window, executor)
    memory.check_order(piece.number, piece.count)
    assert memory.keys is not None

    first, end = piece.positions(executor.geometry.size)
    ranks = len(exchange.ranks)
    tiles = plan.slice_tiles(executor.rank, first, end, piece.length * ranks)
    sums = memory.gradient_sums()
    rows = Rows(*executor.gather_team((q, dout, out, lse))())
    dq = torch.zeros_like(rows.q, dtype=lse.dtype, memory_format=torch.contiguous_format)
    kernel = executor.kernel(plan, q)
    add_gradients_((dq, *sums), rows, memory.keys, tiles, scale, kernel)
    del rows  # free the team's before their gradients travel

    # All slices from this one on have added to the rows of this slice, so these are complete.
    gradients = [executor.reduce_team(dq)]
    first_key, end_key = piece.positions(ranks)
    for total, x in zip(sums, (k, v), strict=True):
        heads_gradient = total[:, first_key:end_key].to(x.dtype)  # [B, U N, G / U, D]
        gradients.append(exchange.to_tokens(heads_gradient, x.shape[2]))
    dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
    return *gradients, dsinks


differentiable(
    "longmesh::slice_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? sinks",
    "float scale, int handle, int exchange, Tensor piece, Tensor plan, int[] window",
    _forward,
    _fake,
    _backward,
    saves=[0, 1],
    owner=lambda scale, handle, exchange, *_: (EXECUTORS[handle], HEAD_EXCHANGES[exchange]),
)
