"""The attention that is measured: causal self-attention of one document, of packed ones of drawn lengths, or windowed.

Shapes: B batch, S positions, H query heads, K key/value heads, D head width; tensors ``[B, S, heads, D]``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.attention import sdpa
from parallel.context import Plan, make_plan
from runtime.errors import UserError

SEED = 3
"""One of 8 draws of 16,384 log-normal tokens, with an imbalance over 2 ranks of a zigzag that can be timed: 1.25."""


def lognormal(rng: np.random.Generator, seq_len: int) -> float:
    """Draw exp(N(7.0, 1.6)) tokens, 64 to a quarter of the sequence: few documents hold most of the work."""
    return float(np.clip(np.exp(rng.normal(7.0, 1.6)), 64, seq_len / 4))


def short(rng: np.random.Generator, seq_len: int) -> float:
    """Draw N(500, 120) tokens, 100 to 1,500: many documents of one size."""
    return float(np.clip(rng.normal(500, 120), 100, 1500))


def chat(rng: np.random.Generator, seq_len: int) -> float:
    """Draw exp(N(6.2, 0.8)) tokens and 3 % of the time 4,096 (1 + Pareto(0.9)), 32 to half of the sequence."""
    drawn = 4096 * (1 + rng.pareto(0.9)) if rng.random() < 0.03 else np.exp(rng.normal(6.2, 0.8))
    return float(np.clip(drawn, 32, seq_len / 2))


LENGTHS: dict[str, Callable[[np.random.Generator, int], float]] = {"lognormal": lognormal, "short": short, "chat": chat}
"""Draws of a document's length, by name."""


def documents_of(name: str, seq_len: int, seed: int = SEED) -> tuple[int, ...]:
    """Return cumulative lengths (0, l1, ..., seq_len) of documents drawn until they fill it; the last is cut."""
    rng, found = np.random.default_rng(seed), [0]
    while found[-1] < seq_len:
        found.append(min(found[-1] + max(1, int(LENGTHS[name](rng, seq_len))), seq_len))
    return tuple(found)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Matrix products per (query, key) pair and head, 2 D operations each: Q K^T and P V forward; Q K^T again, dO V^T, dV,
# dQ and dK backward.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One causal self-attention."""

    seq_length: int = 8192
    batch: int = 1
    num_heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    documents: str | None = None
    """A name in ``LENGTHS``, for packed documents of such lengths; None is one document."""
    window: int | None = None
    """Keys that a query sees, its own among them; None is all before it."""

    def __post_init__(self) -> None:
        for name in ("seq_length", "batch", "num_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_heads % self.kv_heads:
            raise UserError(f"kv_heads is {self.kv_heads}, which does not divide num_heads {self.num_heads}")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.documents not in (None, *LENGTHS):
            raise UserError(f"documents is {self.documents!r}; use one of {', '.join(LENGTHS)}, or none for one")
        if self.window is not None and self.window < 2:
            raise UserError(f"window is {self.window}; it must be 2 or more, a query's own key among them")

    @property
    def mask(self) -> dict[str, Any]:
        """The mask, as ``make_plan`` takes it."""
        packed = None if self.documents is None else documents_of(self.documents, self.seq_length)
        return {"documents": packed, "window": None if self.window is None else (self.window - 1, 0)}

    @property
    def sparse(self) -> bool:
        """True where a query does not see all keys before it."""
        return self.documents is not None or self.window is not None

    @property
    def masked(self) -> str:
        """The mask in words."""
        packed = "one document" if self.documents is None else f"{len(self.mask['documents']) - 1} documents"
        lengths = "" if self.documents is None else f" ({self.documents})"
        return f"causal, {packed}{lengths}" + ("" if self.window is None else f", window {self.window}")

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs."""
        lengths = [end - start for start, end in pairwise(self.mask["documents"] or (0, self.seq_length))]
        seen = [(length, min(length, self.window or length)) for length in lengths]
        return sum(most * (most + 1) // 2 + (length - most) * most for length, most in seen)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the attention by torch's own, document by document; differentiable."""
        mask = self.mask
        ranges = pairwise(mask["documents"] or (0, self.seq_length))
        return torch.cat([sdpa(*(x[:, a:b] for x in (q, k, v)), window=mask["window"]) for a, b in ranges], 1)

    def plan(self, contestant: str, size: int, **options: Any) -> Plan:
        """Return the plan of a contestant, ``method``, ``method/layout`` or ``method@package``, on so many ranks.

        A package's is the plan of our method with the same shards.

        Raises ContextError: as ``make_plan``.
        """
        method, _, layout = contestant.partition("@")[0].partition("/")
        return make_plan(method, seq_len=self.seq_length, size=size, layout=layout or "auto", **self.mask, **options)

    def flops(self, pairs: int, products: int = FORWARD_PRODUCTS + BACKWARD_PRODUCTS) -> int:
        """Count the floating-point operations of that many pairs: matrix products only, a multiply-add as two."""
        return 2 * products * pairs * self.batch * self.num_heads * self.head_dim

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the gradient of the output: the same numbers in every process and on every device."""
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (
            torch.randn(self.batch, self.seq_length, heads, self.head_dim, generator=generator)
            for heads in (self.num_heads, self.kv_heads, self.kv_heads, self.num_heads)
        )
        dtype = DTYPES[self.dtype]
        return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), dout.to(device, dtype)
