"""Merge partial attention results over disjoint sets of keys."""

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block's result into the running result of the same rows, in place.

    With w = sigmoid(block_lse - lse) the merged rows are out + w (block_out - out); no bare exponential appears,
    so nothing overflows. A row that nothing has reached yet has lse = -inf and takes the block's values.

    Args:
        out, block_out: ``[B, T, H, D]``; ``out`` float32 or wider.
        lse, block_lse: ``[B, T, H]``; ``lse`` float32 or wider; ``block_lse`` finite.
    """
    weight = torch.sigmoid(block_lse - lse).to(out.dtype)  # [B, T, H]
    out.lerp_(block_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, block_lse.to(lse.dtype), out=lse)
