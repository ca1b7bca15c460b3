"""Merge partial attention results over disjoint sets of keys."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block's result into the running result of the same rows, in place.

    With w = sigmoid(block_lse - lse) the merged rows are out + w (block_out - out): no bare exponential, so
    nothing overflows. A row without keys so far has lse = -inf and takes the block's values.

    Args:
        out, block_out: ``[B, T, H, D]``, or of any shape ``[..., D]``; ``out`` float32 or wider.
        lse, block_lse: ``[B, T, H]``, or ``[...]``; ``lse`` float32 or wider; ``block_lse`` finite.
    """
    if out.is_cuda and out.dtype == torch.float32 and out.ndim in (3, 4) and _has_triton():
        from kernels.triton.merge import merge_ as in_one_launch

        in_one_launch(out, lse, block_out, block_lse)
        return
    weight = torch.sigmoid(block_lse - lse).to(out.dtype)  # [B, T, H]
    out.lerp_(block_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, block_lse.to(lse.dtype), out=lse)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge C partial results over disjoint keys into one.

    Args:
        out: ``[C, B, T, H, D]``, float32 or wider.
        lse: ``[C, B, T, H]``; -inf where a part has no key for a row.

    Returns:
        out ``[B, T, H, D]`` and lse ``[B, T, H]``; 0 and -inf for a row without any key, such as padding.
    """
    weight = torch.softmax(lse, 0)  # of differences from the largest, so nothing overflows
    weight = weight.masked_fill((lse == float("-inf")).all(0), 0)
    return (out * weight[..., None]).sum(0), torch.logsumexp(lse, 0)
