"""The attention that is measured: of one document, of packed ones of drawn lengths, or windowed."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.parts.attention import sdpa
from parallel.context import Plan, make_plan
from runtime.errors import UserError
from tools.common.shapes import AttentionShape

SEED = 3
"""One of 8 draws of 16,384 log-normal tokens, with an imbalance over 2 ranks of a zigzag that can
be timed: 1.25.
"""


def lognormal(rng: np.random.Generator, seq_len: int) -> float:
    """Draw exp(N(7.0, 1.6)) tokens, 64 to a quarter of the sequence: few documents hold most of the
    work.
    """
    return float(np.clip(np.exp(rng.normal(7.0, 1.6)), 64, seq_len / 4))


def short(rng: np.random.Generator, seq_len: int) -> float:
    """Draw N(500, 120) tokens, 100 to 1,500: many documents of one size."""
    return float(np.clip(rng.normal(500, 120), 100, 1500))


def chat(rng: np.random.Generator, seq_len: int) -> float:
    """Draw exp(N(6.2, 0.8)) tokens and 3 % of the time 4,096 (1 + Pareto(0.9)), 32 to half of the
    sequence.
    """
    drawn = 4096 * (1 + rng.pareto(0.9)) if rng.random() < 0.03 else np.exp(rng.normal(6.2, 0.8))
    return float(np.clip(drawn, 32, seq_len / 2))


LENGTHS: dict[str, Callable[[np.random.Generator, int], float]] = {
    "lognormal": lognormal,
    "short": short,
    "chat": chat,
}
"""Draws of a document's length, by name."""


def documents_of(name: str, seq_len: int, seed: int = SEED) -> tuple[int, ...]:
    """Return cumulative lengths (0, l1, ..., seq_len) of documents drawn until they fill it; the
    last is cut.
    """
    rng, ends = np.random.default_rng(seed), [0]
    while ends[-1] < seq_len:
        ends.append(min(ends[-1] + max(1, int(LENGTHS[name](rng, seq_len))), seq_len))
    return tuple(ends)


@dataclass(frozen=True, kw_only=True)
class MaskedShape(AttentionShape):
    """One causal self-attention under a mask."""

    documents: str | None = None
    """A name in ``LENGTHS``, for packed documents of such lengths; None is one document."""
    window: int | None = None
    """Keys that a query sees, its own among them; None is all before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 2:
            raise UserError(
                f"window is {self.window}; it must be 2 or more, a query's own key among them"
            )

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Cumulative lengths of the documents."""
        return (
            (0, self.seq_length)
            if self.documents is None
            else documents_of(self.documents, self.seq_length)
        )

    @property
    def mask(self) -> dict[str, Any]:
        """The mask, as ``make_plan`` takes it."""
        packed = None if self.documents is None else self.cu_seqlens
        return {
            "documents": packed,
            "window": None if self.window is None else (self.window - 1, 0),
        }

    @property
    def sparse(self) -> bool:
        """True if a query does not see all keys before it."""
        return self.documents is not None or self.window is not None

    @property
    def masked(self) -> str:
        """The mask in words."""
        count = len(self.cu_seqlens) - 1
        packed = (
            "one document" if self.documents is None else f"{count} documents ({self.documents})"
        )
        return f"causal, {packed}" + ("" if self.window is None else f", window {self.window}")

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs."""
        total = 0
        for start, end in pairwise(self.cu_seqlens):
            visible = min(end - start, self.window or end - start)
            total += visible * (visible + 1) // 2 + (end - start - visible) * visible
        return total

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the attention by torch's own, document by document; differentiable."""
        window = self.mask["window"]
        documents = [
            sdpa(q[:, a:b], k[:, a:b], v[:, a:b], window=window)
            for a, b in pairwise(self.cu_seqlens)
        ]
        return torch.cat(documents, 1)

    def plan(self, contestant: str, size: int, **options: Any) -> Plan:
        """Return the plan of a contestant, ``method``, ``method/layout`` or ``method@package``, on
        so many ranks.

        A package's is the plan of our method with the same shards.

        Raises ContextError: as ``make_plan``.
        """
        method, _, layout = contestant.partition("@")[0].partition("/")
        return make_plan(
            method,
            seq_len=self.seq_length,
            size=size,
            layout=layout or "auto",
            **self.mask,
            **options,
        )
