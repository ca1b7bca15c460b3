"""The shape of one causal self-attention: its tensors, (query, key) pairs and FLOPs.

Shapes: B batch, S positions, H query heads, K key/value heads, D head width; tensors ``[B, S,
heads, D]``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Matmuls per head; each costs 2 D operations per (query, key) pair. Forward: Q K^T and P V.
# Backward: Q K^T again, dO V^T, dV, dQ and dK.
FORWARD_PRODUCTS = 2
BACKWARD_PRODUCTS = 5


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Shape of one causal self-attention."""

    seq_length: int = 8192
    batch: int = 1
    num_heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("seq_length", "batch", "num_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 1 or more")

        if self.num_heads % self.kv_heads:
            raise UserError(
                f"kv_heads is {self.kv_heads}; it must divide num_heads {self.num_heads}"
            )
        if self.dtype not in DTYPES:
            raise UserError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")

    @property
    def pairs(self) -> int:
        """Number of unmasked (query, key) pairs."""
        return self.seq_length * (self.seq_length + 1) // 2

    def flops(self, pairs: int, products: int = FORWARD_PRODUCTS + BACKWARD_PRODUCTS) -> int:
        """Return the floating-point operations of attention's matmuls for a number of pairs.

        ``products`` is the number of matmuls, by default those of the forward and backward pass. A
        multiply-add counts as two operations.
        """
        return 2 * products * pairs * self.batch * self.num_heads * self.head_dim

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the output's gradient, equal in every process and on every device."""
        generator = torch.Generator().manual_seed(0)

        def random(heads: int) -> Tensor:
            shape = (self.batch, self.seq_length, heads, self.head_dim)
            tensor = torch.randn(shape, generator=generator)
            return tensor.to(device, DTYPES[self.dtype])

        q = random(self.num_heads)
        k = random(self.kv_heads)
        v = random(self.kv_heads)
        dout = random(self.num_heads)
        return q, k, v, dout
