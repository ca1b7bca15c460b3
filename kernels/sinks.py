"""Attention sinks: one more key per head, with a score of its own and a value of 0, in the softmax's denominator.

off-by-one is a score of 0 (Miller 2023, "Attention is off by one"); gpt-oss and Megatron-LM learn the scores. A sink
needs no tile: it is added once to the global results of all real keys, and the gradients of tiles, which take these
results, then hold as they are.

Shapes: out and dout ``[B, T, H, D]``, lse ``[B, T, H]``, sinks ``[H]``.
"""

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse with a sink in every row's denominator, in their dtypes.

    A row without keys, of out 0 and lse -inf, stays 0 and has the lse of its sink.

    Args:
        out, lse: global results of the rows, float32 or wider.
        sinks: the score of each head's sink, of any float dtype.
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
