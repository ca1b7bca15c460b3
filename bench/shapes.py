"""Shapes of the measured attention: one document, packed ones of random lengths, or a window."""

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
"""Seed of the documents' lengths, one of 8 tried: with it, 16,384 log-normal tokens on 2 ranks have
an imbalance of 1.25 under zigzag, large enough to be measured."""


def lognormal(rng: np.random.Generator, seq_len: int) -> float:
    """Draw a length of exp(N(7.0, 1.6)) tokens, from 64 to a quarter of the sequence.

    A few documents have most of the work.
    """
    return float(np.clip(np.exp(rng.normal(7.0, 1.6)), 64, seq_len / 4))


def short(rng: np.random.Generator, seq_len: int) -> float:
    """Draw a length of N(500, 120) tokens, 100 to 1,500: many documents of about one size."""
    return float(np.clip(rng.normal(500, 120), 100, 1500))


def chat(rng: np.random.Generator, seq_len: int) -> float:
    """Draw a length of exp(N(6.2, 0.8)) tokens, or in 3 % of draws 4,096 (1 + Pareto(0.9)).

    The length is at least 32, and at most half of the sequence.
    """
    if rng.random() < 0.03:
        length = 4096 * (1 + rng.pareto(0.9))
    else:
        length = np.exp(rng.normal(6.2, 0.8))
    return float(np.clip(length, 32, seq_len / 2))


LENGTHS: dict[str, Callable[[np.random.Generator, int], float]] = {
    "lognormal": lognormal,
    "short": short,
    "chat": chat,
}
"""Functions that draw a document's length, keyed by name."""


def documents_of(name: str, seq_len: int, seed: int = SEED) -> tuple[int, ...]:
    """Draw documents until they fill a sequence; return their cumulative lengths.

    These are (0, l1, l1 + l2, ..., seq_len); the last document is cut. ``name`` is a key of
    ``LENGTHS``.
    """
    rng = np.random.default_rng(seed)
    cu_seqlens = [0]
    while cu_seqlens[-1] < seq_len:
        length = max(1, int(LENGTHS[name](rng, seq_len)))
        cu_seqlens.append(min(cu_seqlens[-1] + length, seq_len))
    return tuple(cu_seqlens)


@dataclass(frozen=True, kw_only=True)
class MaskedShape(AttentionShape):
    """Shape of one causal self-attention under a mask."""

    documents: str | None = None
    """Name in ``LENGTHS`` for packed documents of such lengths; None is one document."""
    window: int | None = None
    """Number of keys that a query sees, including its own; None means all keys before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 2:
            raise UserError(
                f"window is {self.window}; it must be 2 or more, including the query's own key"
            )

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Cumulative lengths of the documents, from 0 to ``seq_length``."""
        if self.documents is None:
            return (0, self.seq_length)
        return documents_of(self.documents, self.seq_length)

    @property
    def mask(self) -> dict[str, Any]:
        """The mask as keyword arguments of ``make_plan``."""
        return {
            "documents": None if self.documents is None else self.cu_seqlens,
            "window": None if self.window is None else (self.window - 1, 0),
        }

    @property
    def sparse(self) -> bool:
        """True if a query does not see all keys before it."""
        return self.documents is not None or self.window is not None

    @property
    def masked(self) -> str:
        """Description of the mask in words."""
        words = "causal, one document"
        if self.documents is not None:
            words = f"causal, {len(self.cu_seqlens) - 1} documents ({self.documents})"
        if self.window is not None:
            words += f", window {self.window}"
        return words

    @property
    def pairs(self) -> int:
        """Number of unmasked (query, key) pairs."""
        total = 0
        for start, end in pairwise(self.cu_seqlens):
            visible = min(end - start, self.window or end - start)
            total += visible * (visible + 1) // 2 + (end - start - visible) * visible
        return total

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the attention by torch's SDPA, document by document; differentiable."""
        window = self.mask["window"]
        outputs = [
            sdpa(q[:, start:end], k[:, start:end], v[:, start:end], window=window)
            for start, end in pairwise(self.cu_seqlens)
        ]
        return torch.cat(outputs, 1)

    def plan(self, contestant: str, size: int, **options: Any) -> Plan:
        """Return the plan of a contestant on ``size`` ranks.

        A contestant is ``method``, ``method/layout`` or ``method@package``; a package's plan is
        that of Longmesh's method with the same shards.

        Raises ContextError as ``make_plan`` does.
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
