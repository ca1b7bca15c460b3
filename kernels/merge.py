"""Merge partial attention results over disjoint sets of keys, and attention sinks, which are such a set of one.

A sink is one more key per head, with a score of its own and a value of 0, in the softmax's denominator. off-by-one is a
score of 0 (Miller 2023, "Attention is off by one"); gpt-oss and Megatron-LM learn the scores. A sink needs no tile: it
is added once to the global results of all real keys, and the gradients of tiles, which take these results, then hold as
they are.
"""

import torch
from torch import Tensor

from kernels.triton import has_triton


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold one block's result into the running result of the same rows, in place.

    With w = sigmoid(block_lse - lse) the merged rows are out + w (block_out - out): no bare exponential, so
    nothing overflows. A row without keys so far has lse = -inf and takes the block's values.

    Args:
        out, block_out: ``[B, T, H, D]``, or of any shape ``[..., D]``; ``out`` float32 or wider.
        lse, block_lse: ``[B, T, H]``, or ``[...]``; ``lse`` float32 or wider; ``block_lse`` finite.
    """
    if out.is_cuda and out.dtype == torch.float32 and out.ndim in (3, 4) and has_triton():
        from kernels.triton.pointwise import merge_ as in_one_launch

        in_one_launch(out, lse, block_out, block_lse)
        return
    weight = torch.sigmoid(block_lse - lse).to(out.dtype)  # [B, T, H]
    out.lerp_(block_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, block_lse.to(lse.dtype), out=lse)


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


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out ``[B, T, H, D]`` and lse ``[B, T, H]`` with a sink in every row's denominator, in their dtypes.

    A row without keys, of out 0 and lse -inf, stays 0 and has the lse of its sink.

    Args:
        out, lse: global results of the rows, float32 or wider.
        sinks: ``[H]``, the score of each head's sink, of any float dtype.
    """
    sinks = sinks.to(lse.dtype)
    weight = torch.sigmoid(lse - sinks)  # exp(lse) / (exp(lse) + exp(sink)); no bare exponential, so nothing overflows
    return out * weight.to(out.dtype)[..., None], torch.logaddexp(lse, sinks)


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return dsinks ``[H]``, in lse's dtype: - sum over rows of exp(sink - lse) * (dout . out).

    Args:
        dout: gradient of ``out``.
        out, lse: results of ``with_sinks``.
        sinks: as there.
    """
    share = torch.exp(sinks.to(lse.dtype) - lse)  # of the softmax, at most 1
    return -(share * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 1))
