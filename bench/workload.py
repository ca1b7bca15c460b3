"""The attention that is measured: one causal self-attention, forward and backward, of one document or packed ones.

Shapes: B batch, S positions, H query heads, K key/value heads, D head width; tensors ``[B, S, heads, D]``.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bench.errors import MeasureError
from bench.packing import LENGTHS, documents_of
from model.attention import sdpa
from parallel.context import Plan, make_plan
from runtime.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Matrix products per (query, key) pair and head, 2 D operations each: Q K^T and P V forward; Q K^T again, dO V^T, dV,
# dQ and dK backward.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5

MISMATCH = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative difference of a fingerprint beyond which two computations count as different."""


@dataclass(frozen=True, kw_only=True)
class Workload:
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
        """Whether a query does not see all keys before it."""
        return self.documents is not None or self.window is not None

    @property
    def masked(self) -> str:
        """What queries see, in words."""
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


def fingerprint(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, float64 ``[len(tensors)]``, by which to compare computations."""
    return torch.stack([x.double().square().sum() for x in tensors])


def check_same(
    name: str, got: list[float], want: list[float], dtype: str, truth: str = "scaled_dot_product_attention"
) -> None:
    """Refuse to time what does not compute the same as ``truth``.

    Raises MeasureError: the fingerprints differ by more than ``MISMATCH``.
    """
    if not all(abs(a - b) <= MISMATCH[dtype] * abs(b) for a, b in zip(got, want, strict=True)):  # a nan differs
        raise MeasureError(
            f"{name} computes something else than {truth}: the squares of out, dq, dk, dv sum to {got} and should sum "
            f"to {want}; its time would mean nothing"
        )
