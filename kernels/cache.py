"""The KV cache of a layer in generation: keys and values of the tokens read so far, and attention
to them.

A cache may hold some of the rows only, if other ranks hold the rest: partial results are merged by
their lse.

Shapes: B sequences, T new tokens, S rows of a cache, H query heads, G key and value heads, D width
of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import merged, with_sinks
from runtime.tensors import accum_dtype

UNSEEN = 1 << 62
"""Position of a row that no query sees."""
PART = 1024
"""Rows that are joined as they come; joining them with all rows would copy the cache for every
token.
"""
AT_ONCE = 1 << 14
"""Rows whose scores, and keys in float32, exist at once."""


class KVCache:
    """Rows of keys and values [B, G, S, D] with their positions int64 [B, S], in parts along S.

    Heads come before rows, so that a product with all rows of a head reads them where they lie.
    """

    def __init__(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Begin with these rows, which may be none."""
        self._parts = [(k, v, positions)]

    def __len__(self) -> int:
        """Return S."""
        return sum(positions.shape[1] for *_, positions in self._parts)

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Add rows."""
        last_k, last_v, last = self._parts[-1]
        if last.shape[1] + positions.shape[1] <= PART:
            del self._parts[-1]
            k, v, positions = (
                torch.cat((last_k, k), 2),
                torch.cat((last_v, v), 2),
                torch.cat((last, positions), 1),
            )
        self._parts.append((k, v, positions))

    def drop(self, before: Tensor) -> None:
        """Drop rows that are padding, or before position ``before`` [B], in all sequences."""
        kept = []
        for k, v, positions in self._parts:
            rows = ((positions >= before[:, None]) & (positions != UNSEEN)).any(0).nonzero()[:, 0]
            if len(rows) < positions.shape[1]:
                k, v, positions = (
                    k.index_select(2, rows),
                    v.index_select(2, rows),
                    positions.index_select(1, rows),
                )
            kept.append((k, v, positions))
        self._parts = [part for part in kept if part[2].shape[1]] or kept[-1:]

    def attend(
        self, q: Tensor, positions: Tensor, left: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with q [B, T, H, D] at ``positions`` [B, T] to the rows that are not after them.

        Args:
            left: how many positions before its own a query sees; None is all.

        Returns:
            out [B, T, H, D] and lse [B, T, H], float32 or wider; 0 and -inf for a query that sees
            none of these rows.
        """
        found = []
        at = positions[..., None]  # [B, T, 1]
        for keys, values, places in self._parts:
            cut = keys.split(AT_ONCE, 2), values.split(AT_ONCE, 2), places.split(AT_ONCE, 1)
            for k, v, rows in zip(*cut, strict=True):
                seen = rows[:, None] <= at  # [B, T, S]
                if left is not None:
                    seen &= rows[:, None] >= at - left
                found.append(_attend(q, k, v, seen, scale))
        return found[0] if len(found) == 1 else merged(*map(torch.stack, zip(*found, strict=True)))


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to the rows that each query sees, bool [B, T, S]; results as in ``KVCache.attend``."""
    q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
    tokens, heads = q.shape[1], k.shape[1]
    grouped = (
        (q * scale).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
    )  # [B, G, T H / G, D]
    hidden = ~seen[:, None, :, None]  # [B, 1, T, 1, S]
    scores = (
        (grouped @ k.mT).unflatten(2, (tokens, -1)).masked_fill(hidden, float("-inf"))
    )  # [B, G, T, H / G, S]
    weights = scores.softmax(-1).masked_fill(hidden, 0)  # not NaN where nothing is seen
    out = (weights.flatten(2, 3) @ v).unflatten(2, (tokens, -1))  # [B, G, T, H / G, D]
    return out.transpose(1, 2).flatten(2, 3), scores.logsumexp(-1).transpose(1, 2).flatten(2)


Merge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""This process's (out, lse) of new queries -> those over the rows of all processes that share a
cache.
"""


class States:
    """State that a model's layers keep of the tokens read so far.

    Linear attention keeps a state [B, H, D, E], softmax attention a KVCache. ``read`` precedes
    every forward. Of first tokens that processes share, each keeps its own rows, and all keep the
    state after the last.
    """

    def __init__(
        self,
        layers: int,
        merge: Merge = lambda out, lse: (out, lse),
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Begin before the first token; ``total`` sums over the processes that share the first
        tokens, if several.
        """
        self.layers: list[Any] = [None] * layers
        """The state of each layer; None before the first token."""
        self._merge, self._total = merge, total

    def read(
        self, positions: Tensor, ends: Tensor, keep: bool = True, *, shared: bool = False
    ) -> None:
        """Say what the next forward's tokens are.

        Args:
            positions: int64 [B, T], or [1, T] if they are the same in all sequences.
            ends: int64 [B], how many tokens of each sequence will have been read; positions from
                there on are padding.
            keep: whether this process keeps the rows of these tokens, not another one.
            shared: whether each process has other tokens of the sequences, which are then the first
                ones.
        """
        real = positions < ends[:, None]  # [B, T]
        there = real.any(0).nonzero()[:, 0]
        self._positions, self._ends, self.shared = positions, ends, shared
        self.count = len(there)
        """Tokens here before the ends: those of layers with a state, whose sequences are of one
        length.
        """
        self._kept = there if keep else there[:0]
        self._rows = positions.where(real, UNSEEN).index_select(1, self._kept)

    @property
    def left(self) -> Tensor:
        """Return how many tokens of a sequence follow each of the ``count`` here, int64 [count]."""
        return self._ends[0] - 1 - self._positions[0, : self.count]

    def last(self, rows: Tensor, count: int) -> Tensor:
        """Return the last rows [B, count, ...] of rows [B, T, ...] that processes share, zeros
        before the first.
        """
        places = count - 1 - self.left
        found = rows.new_zeros(len(rows), count, *rows.shape[2:])
        here = places >= 0
        found[:, places[here]] = rows[:, : self.count][:, here]
        return self.total(found)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x over the processes that share the first tokens."""
        assert self._total is not None
        return self._total(x)

    def attention(
        self, layer: int, k: Tensor, v: Tensor, left: int | None, sinks: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Keep a layer's new rows; return q -> its attention to all rows, or None for the first
        tokens.

        The first tokens see each other alone, which is an ordinary attention.

        Args:
            k, v: [B, T, G, D]. left: how many positions before its own a query sees, None for all;
            the layer keeps what the next one sees. sinks: [H], scores of attention sinks.
        """
        k, v = (x.transpose(1, 2).index_select(2, self._kept) for x in (k, v))  # [B, G, S, D]
        cache: KVCache | None = self.layers[layer]
        if cache is None:
            self.layers[layer] = cache = KVCache(k, v, self._rows)
            self._drop(cache, left)
            return None
        cache.append(k, v, self._rows)

        def attention(q: Tensor) -> Tensor:
            out, lse = self._merge(*cache.attend(q, self._positions, left, q.shape[-1] ** -0.5))
            self._drop(cache, left)
            return (out if sinks is None else with_sinks(out, lse, sinks)[0]).to(q.dtype)

        return attention

    def _drop(self, cache: KVCache, left: int | None) -> None:
        if left is not None:
            cache.drop(self._ends - left)
