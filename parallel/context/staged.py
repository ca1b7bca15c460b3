"""Executor that runs softmax attention in stages of heads, to bound the memory of the exchange.

An exchange of heads doubles a layer's tensors: q, k, v and out exist before it and after it. With
stages, only a part of the exchanged tensors exists at any time, at the price of more messages.

Shapes as in ``parallel.context.executor``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from kernels.blocks import Keys, Rows
from parallel.context.executor import Executor
from parallel.context.plan import Plan
from parallel.context.transport import HeadExchange, Tensors


@dataclass(eq=False)
class StagedExecutor(Executor):
    """Softmax attention that exchanges heads itself, some at a time (UPipe, arXiv 2602.21196).

    In a stage, each of U ranks attends with H / (U * stages) query heads, so exchanged tensors and
    the sums of the attention take 1 / stages of the memory. No exchanged tensor is saved: the
    backward exchanges q, k, v, out and lse again. Stages are ordered so that each KV head is
    exchanged once, for all queries that share it.
    """

    heads: HeadExchange
    stages: int

    @property
    def gathers_keys(self) -> bool:
        """False: k and v can be gathered only after the heads of a stage are exchanged."""
        return False

    def forward(
        self,
        plan: Plan,
        q: Tensor,
        keys: Keys,
        sinks: Tensor | None,
        scale: float,
        prefetch: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, D]`` in q's dtype and lse ``[B, T, H]`` in float32 or wider.

        ``sinks`` is ``[H]``.
        """
        heads = self.heads
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))

        for kv_subset, stages in self._stages(q, keys.k):
            local_keys = self._exchanged_keys(kv_subset, keys)
            for subset in stages:
                local_sinks = None
                if sinks is not None:
                    local_sinks = heads.local_heads(subset(sinks[None, None])[0, 0])

                stage_q = heads.to_heads(subset(q))
                results = super().forward(plan, stage_q, local_keys, local_sinks, scale)
                del stage_q
                subset.put(out, heads.to_tokens(results[0]))
                subset.put(lse, heads.to_tokens(results[1][..., None])[..., 0])
                del results  # free them before the next stage allocates
        return out, lse

    def backward(self, plan: Plan, rows: Rows, keys: Keys, scale: float) -> Tensors:
        """Return dq, dk and dv in the dtypes of q, k and v."""
        heads = self.heads
        q, dout, out, lse = rows
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, *keys))

        for kv_subset, stages in self._stages(q, keys.k):
            local_keys = self._exchanged_keys(kv_subset, keys)
            kv_sums: list[Tensor] = []  # dk and dv of this turn's heads, summed over stages

            for subset in stages:
                stage_q, stage_dout, stage_out, stage_lse = (
                    heads.to_heads(subset(x)) for x in (q, dout, out, lse[..., None])
                )
                stage_rows = Rows(stage_q, stage_dout, stage_out, stage_lse[..., 0])
                stage_dq, *kv_gradients = super().backward(plan, stage_rows, local_keys, scale)
                # Free them before the exchange and the next stage allocate.
                del stage_q, stage_dout, stage_out, stage_lse, stage_rows

                if kv_sums:
                    for total, gradient in zip(kv_sums, kv_gradients, strict=True):
                        total.add_(gradient)
                    del gradient
                else:
                    kv_sums = [x.to(lse.dtype) for x in kv_gradients]
                del kv_gradients

                subset.put(dq, heads.to_tokens(stage_dq.to(q.dtype)))
                del stage_dq

            for gradient, total in zip((dk, dv), kv_sums, strict=True):
                kv_subset.put(gradient, heads.to_tokens(total.to(gradient.dtype), kv_subset.count))
        return dq, dk, dv

    def _exchanged_keys(self, subset: "HeadSubset", keys: Keys) -> Keys:
        """Exchange the KV heads of one subset."""
        return Keys(*(self.heads.to_heads(subset(x)) for x in keys))

    def _stages(self, q: Tensor, k: Tensor) -> Iterator[tuple["HeadSubset", list["HeadSubset"]]]:
        """Yield the KV heads to exchange together, and the query heads of each of their stages."""
        num_ranks = len(self.heads.ranks)
        num_heads = q.shape[2]
        num_kv_heads = k.shape[2]
        # With fewer KV heads than ranks, several ranks share a KV head.
        local_kv_heads = max(1, num_kv_heads // num_ranks)

        # Turns exchange different KV heads; all stages of a turn attend with the same KV heads.
        turns = gcd(self.stages, local_kv_heads)
        kv_per_turn = local_kv_heads // turns
        stages_per_turn = self.stages // turns
        group_size = num_heads // (num_ranks * local_kv_heads * stages_per_turn)

        kv_split = (min(num_ranks, num_kv_heads), turns, kv_per_turn, 1, 1)
        split = (num_ranks, turns, kv_per_turn, stages_per_turn, group_size)
        for turn in range(turns):
            subsets = [HeadSubset(split, turn, index) for index in range(stages_per_turn)]
            yield HeadSubset(kv_split, turn, 0), subsets


@dataclass(frozen=True)
class HeadSubset:
    """The heads of one stage, on all ranks.

    ``split`` factors the head dimension into (rank, turn, KV head, index, head); the subset has the
    heads at ``turn`` and ``index``.
    """

    split: tuple[int, ...]
    turn: int
    index: int

    @property
    def count(self) -> int:
        """Number of heads in the subset, over all ranks."""
        return self.split[0] * self.split[2] * self.split[4]

    def __call__(self, x: Tensor) -> Tensor:
        """Select the heads of this subset: ``[B, T, H, ...] -> [B, T, count, ...]``."""
        return self._view(x).flatten(2, 4)

    def put(self, target: Tensor, x: Tensor) -> None:
        """Write x ``[B, T, count, ...]``, this subset's heads, to ``target`` ``[B, T, H, ...]``."""
        view = self._view(target)
        view.copy_(x.view_as(view))

    def _view(self, x: Tensor) -> Tensor:
        return x.unflatten(2, self.split).select(5, self.index).select(3, self.turn)
