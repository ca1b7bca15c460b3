"""A layer's KV cache for generation: keys and values of earlier tokens, and attention to them.

A rank may hold only some of the rows. Then every rank attends to its own rows, and the partial
results are merged by their lse.

Shapes: B sequences, T new tokens, S rows of a cache, H query heads, G key and value heads, D width
of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import merged, with_sinks
from runtime.tensors import accum_dtype

NO_POSITION = 1 << 62
"""Position of a padding token, which no query sees."""
PART = 1024
"""Maximum number of rows that the last part of a cache may have after new rows are appended to it.

Any more rows begin a new part: appending to one tensor of all rows would copy the whole cache for
every token.
"""
ROWS_PER_STEP = 1 << 14
"""Number of cache rows to attend to in one step; bounds the memory of scores and float32 keys."""


class KVCache:
    """Rows of keys and values [B, G, S, D] with positions int64 [B, S], in several parts along S.

    Heads come before rows, so that a matmul with all rows of a head reads contiguous memory.
    """

    def __init__(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Create the cache from these rows; there may be none."""
        self._parts = [(k, v, positions)]

    def __len__(self) -> int:
        """Return the number of rows, S."""
        return sum(positions.shape[1] for *_, positions in self._parts)

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Append rows to the cache."""
        last_k, last_v, last_positions = self._parts[-1]
        if last_positions.shape[1] + positions.shape[1] <= PART:
            del self._parts[-1]
            k = torch.cat((last_k, k), 2)
            v = torch.cat((last_v, v), 2)
            positions = torch.cat((last_positions, positions), 1)
        self._parts.append((k, v, positions))

    def drop(self, before: Tensor) -> None:
        """Remove rows that, in all sequences, are padding or lie before position ``before`` [B]."""
        parts = []
        for k, v, positions in self._parts:
            needed = (positions >= before[:, None]) & (positions != NO_POSITION)  # [B, S]
            rows = needed.any(0).nonzero()[:, 0]
            if len(rows) < positions.shape[1]:
                k = k.index_select(2, rows)
                v = v.index_select(2, rows)
                positions = positions.index_select(1, rows)
            parts.append((k, v, positions))
        nonempty = [part for part in parts if part[2].shape[1]]
        self._parts = nonempty or parts[-1:]

    def attend(
        self, q: Tensor, positions: Tensor, behind: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with q [B, T, H, D] at ``positions`` [B, T] to the rows at or before them.

        Args:
            behind: number of positions before its own that a query sees; None means all.

        Returns:
            out [B, T, H, D] and lse [B, T, H], float32 or wider; 0 and -inf for a query that sees
            none of these rows.
        """
        outs = []
        lses = []
        query_positions = positions[..., None]  # [B, T, 1]
        for part_k, part_v, part_positions in self._parts:
            steps = zip(
                part_k.split(ROWS_PER_STEP, 2),
                part_v.split(ROWS_PER_STEP, 2),
                part_positions.split(ROWS_PER_STEP, 1),
                strict=True,
            )
            for k, v, key_positions in steps:
                visible = key_positions[:, None] <= query_positions  # [B, T, S]
                if behind is not None:
                    visible &= key_positions[:, None] >= query_positions - behind
                out, lse = _attend(q, k, v, visible, scale)
                outs.append(out)
                lses.append(lse)
        if len(outs) == 1:
            return outs[0], lses[0]
        return merged(torch.stack(outs), torch.stack(lses))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the rows marked in a bool mask [B, T, S]; results as in ``KVCache.attend``."""
    q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
    tokens = q.shape[1]
    kv_heads = k.shape[1]
    grouped_q = (q * scale).unflatten(2, (kv_heads, -1)).transpose(1, 2)  # [B, G, T, H / G, D]
    grouped_q = grouped_q.flatten(2, 3)  # [B, G, T H / G, D]
    hidden = ~visible[:, None, :, None]  # [B, 1, T, 1, S]
    scores = (grouped_q @ k.mT).unflatten(2, (tokens, -1))  # [B, G, T, H / G, S]
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1).masked_fill(hidden, 0)  # avoids NaN for a query that sees no row
    out = (weights.flatten(2, 3) @ v).unflatten(2, (tokens, -1))  # [B, G, T, H / G, D]
    out = out.transpose(1, 2).flatten(2, 3)  # [B, T, H, D]
    lse = scores.logsumexp(-1).transpose(1, 2).flatten(2)  # [B, T, H]
    return out, lse


Merge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that merges (out, lse) over this process's rows with those of the other processes."""


def _only_process(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse


class States:
    """State of each layer of a model that generates text, after the tokens read so far.

    Linear attention has a state [B, H, D, E], softmax attention a KVCache. Call ``read`` before
    every forward pass. If processes share the prompt's tokens, each saves the keys and values of
    its own tokens, and all save the state after the last token.
    """

    def __init__(
        self,
        layers: int,
        merge: Merge = _only_process,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Create the state before the first token.

        Args:
            layers: number of layers.
            merge: function that merges attention over the processes that share a cache.
            total: function that sums over the processes that share the first tokens, if there are
                several.
        """
        self.layers: list[Any] = [None] * layers
        """State of each layer; None before the first token."""
        self._merge = merge
        self._total = total

    def read(
        self, positions: Tensor, ends: Tensor, keep: bool = True, *, shared: bool = False
    ) -> None:
        """Announce the tokens of the next forward pass, so that layers save the right rows.

        Args:
            positions: int64 [B, T], or [1, T] if they are the same in all sequences.
            ends: int64 [B], number of tokens that each sequence has once this forward pass has
                read its tokens; positions from there on are padding.
            keep: True if this process, not another one, saves the rows of these tokens.
            shared: True if each process has different tokens of the sequences, which is possible
                only for the first tokens.
        """
        real = positions < ends[:, None]  # [B, T]
        real_tokens = real.any(0).nonzero()[:, 0]
        self._positions = positions
        self._ends = ends
        self.shared = shared
        self.count = len(real_tokens)
        """Number of tokens of this forward pass without padding. Only layers with a recurrent state
        use it; their sequences all have the same length.
        """
        self._saved_tokens = real_tokens if keep else real_tokens[:0]
        masked_positions = positions.where(real, NO_POSITION)
        self._saved_positions = masked_positions.index_select(1, self._saved_tokens)

    @property
    def remaining_tokens(self) -> Tensor:
        """Number of tokens that follow each of the ``count`` tokens, int64 [count]."""
        return self._ends[0] - 1 - self._positions[0, : self.count]

    def last(self, rows: Tensor, count: int) -> Tensor:
        """Return the last ``count`` rows of a sequence that processes share.

        Args:
            rows: [B, T, ...], the rows of this process's tokens.

        Returns:
            [B, count, ...], with zeros before the first token.
        """
        slots = count - 1 - self.remaining_tokens
        last_rows = rows.new_zeros(len(rows), count, *rows.shape[2:])
        local = slots >= 0
        last_rows[:, slots[local]] = rows[:, : self.count][:, local]
        return self.total(last_rows)

    def total(self, x: Tensor) -> Tensor:
        """Sum x over the processes that share the first tokens."""
        assert self._total is not None
        return self._total(x)

    def attention(
        self, layer: int, k: Tensor, v: Tensor, behind: int | None, sinks: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Save a layer's new rows, and return the function that attends with q to all rows.

        Returns None for the first tokens, which ordinary attention computes: they see only each
        other.

        Args:
            k, v: [B, T, G, D].
            behind: number of positions before its own that a query sees; None means all. The layer
                saves only rows that the next token sees.
            sinks: [H], scores of attention sinks.
        """
        k = k.transpose(1, 2).index_select(2, self._saved_tokens)  # [B, G, S, D]
        v = v.transpose(1, 2).index_select(2, self._saved_tokens)
        cache: KVCache | None = self.layers[layer]
        if cache is None:
            self.layers[layer] = cache = KVCache(k, v, self._saved_positions)
            self._drop(cache, behind)
            return None
        cache.append(k, v, self._saved_positions)

        def attention(q: Tensor) -> Tensor:
            scale = q.shape[-1] ** -0.5
            out, lse = self._merge(*cache.attend(q, self._positions, behind, scale))
            self._drop(cache, behind)
            if sinks is not None:
                out, _ = with_sinks(out, lse, sinks)
            return out.to(q.dtype)

        return attention

    def _drop(self, cache: KVCache, behind: int | None) -> None:
        if behind is not None:
            cache.drop(self._ends - behind)
