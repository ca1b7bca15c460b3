"""The gated delta rule by flash-linear-attention (fla.ops.gated_delta_rule), where it is installed: whole documents.

It differentiates itself, takes 16-bit operands and differences of summed gates, and passes no states between ranks.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from runtime.tensors import to_device


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    documents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``kernels.delta.rule.delta_rule`` with a gate per head; documents lie behind each other in one row."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch, length = v.shape[:2]
    apart = documents is not None and len(documents) > 2
    more: dict[str, Tensor] = {}
    if documents is not None and apart:
        count = len(documents) - 1
        ends = [row * length + end for row in range(batch) for _, end in pairwise(documents)]
        more["cu_seqlens"] = to_device(torch.tensor([0, *ends]), v.device)
        q, k, v, g, beta = (x.flatten(0, 1)[None] for x in (q, k, v, g, beta))
        if state is not None:  # of each row's first document
            later = state.new_zeros(batch, count - 1, *state.shape[1:])
            state = torch.cat((state[:, None], later), 1).flatten(0, 1)
    out, final = chunk_gated_delta_rule(
        q, k, v, g, beta, scale=1.0, initial_state=state, output_final_state=True, **more
    )  # fmt: skip
    if apart:
        out, final = out[0].unflatten(0, (batch, length)), final.unflatten(0, (batch, -1))[:, -1]
    return out, final
