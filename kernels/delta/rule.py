"""Linear attention by the gated delta rule, forward and backward: Gated DeltaNet and Kimi Delta Attention.

A token's key k overwrites what the state S [D, E] holds there: it decays S by its gate, then moves the value at k by
the share beta towards its own (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, equation 10):

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T      o_t = S_t^T q_t

The gate is one number per head, or one per channel of the key (Kimi Linear 2025, arXiv:2510.26692). Keys have norm 1 or
less and queries are scaled before; with beta up to 2 no state grows.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.delta import scan as scans
from kernels.delta.scan import select_delta_backend
from kernels.linear_attention import check_sequence
from runtime.tensors import differentiable, to_device


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    documents: Sequence[int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule; differentiable in all tensors.

    Args:
        q: ``[B, T, K, D]``, as k; key head h serves the value heads h n to h n + n - 1.
        v: ``[B, T, H, E]``, H = n K.
        g: log of the gates, <= 0: ``[B, T, H]``, or ``[B, T, H, D]`` with H = K.
        beta: ``[B, T, H]``, from 0 to 2.
        state: state before the first token ``[B, H, D, E]``, default zero; only the first document sees it.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., T); each resets the state.
        backend: as for ``select_delta_backend``.

    Returns:
        out ``[B, T, H, E]`` in v's dtype, and the state after the last token in float32 or wider.

    Raises:
        ValueError: shapes that do not match.
        UserError: the backend does not exist.
    """
    check((q, k, v, g, beta), state, documents)
    name = select_delta_backend(backend, q.device.type, q.dtype, per_channel=g.ndim == 4, width=q.shape[-1])
    if name == "reference":
        return reference.delta_rule(q, k, v, g, beta, state, documents=documents)
    if name == "fla":
        return by_fla((q, k, v, g, beta), state, documents)
    out, states = torch.ops.longmesh.delta_rule(q, k, v, forgetting(g, documents), beta, state, name)
    return out, states[-1]


def check(inputs: tuple[Tensor, ...], state: Tensor | None = None, documents: Sequence[int] | None = None) -> None:
    """Raise ValueError for the first argument of ``delta_rule`` that is wrong."""
    q, k, v, g, beta = inputs
    (batch, length, key_heads, width), heads = q.shape, v.shape[2]
    if k.shape != q.shape or v.shape[:2] != q.shape[:2] or heads % key_heads or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"the delta rule takes q and k [B, T, K, D] and v [B, T, H, E] of one dtype, H a multiple of K, and got q "
            f"{tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
        )
    if batch * length == 0:
        raise ValueError(f"the delta rule got {batch} sequences of {length} tokens; give at least one of each")
    per_head = batch, length, heads
    per_channel = (*per_head, width) if heads == key_heads else per_head
    if g.shape not in (per_head, per_channel) or beta.shape != per_head:
        raise ValueError(
            f"g has shape {tuple(g.shape)} and beta {tuple(beta.shape)}; beta is {per_head}, g that or {per_channel}"
        )
    check_sequence(length, (batch, heads, width, v.shape[-1]), state, documents)


def by_fla(inputs: tuple[Tensor, ...], state: Tensor | None, documents: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Compute the rule by flash-linear-attention (fla.ops.gated_delta_rule), with a gate per head; differentiable.

    It takes 16-bit operands and differences of summed gates, and passes no states between ranks. Documents lie behind
    each other in one row.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = inputs
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


def forgetting(g: Tensor, documents: Sequence[int] | None) -> Tensor:
    """Return gates that forget everything, -inf, where a document begins after the first."""
    if documents is None or len(documents) == 2:
        return g
    begins = torch.zeros(g.shape[1], dtype=torch.bool)
    begins[list(documents[1:-1])] = True
    begins = begins.to(g.device, non_blocking=True)
    return g.masked_fill(begins.view(-1, *[1] * (g.ndim - 2)), -math.inf)


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    *inputs, backend = given
    with torch.autocast(inputs[0].device.type, enabled=False):
        out, states = scans.scan(*inputs, backend=backend)
    return out.to(inputs[2].dtype), states


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), scans.empty_states(k, v)


def _backward(dout: Tensor, dstates: Tensor | None, *given: Any) -> list[Tensor]:
    *inputs, _, states, backend = given
    dfinal = None if dstates is None else dstates[-1]
    with torch.autocast(dout.device.type, enabled=False):
        *found, dstate = scans.backward(tuple(inputs), states, dout, dfinal, backend=backend)
    return [*found, dstate.clone()]  # not all states' memory


differentiable(
    "longmesh::delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state",
    "str backend",
    *(_forward, _fake, _backward),
    saves=[1],
)
