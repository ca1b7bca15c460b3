"""Naive softmax attention, linear attention and delta rule: references for every fast path.

Softmax attention materialises the whole score matrix, and the recurrences go token by token. This
is slow, but short enough to check against the papers by eye. Tests compare the outputs and every
gradient of a fast path with these functions.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads (H a multiple of K), G = H / K
query heads per key/value head, D head width. Linear attention has one key head per query head, keys
of width D and values of width E.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention with all scores in memory; differentiable.

    Everything is computed in the dtype of the inputs.

    Args:
        q: ``[B, T, H, D]``.
        k, v: ``[B, S, K, D]``. T == S unless query t may see every key.
        causal: query t sees keys 0..t.
        scale: factor of the scores; default 1 / sqrt(D).
        window: (behind, ahead); query t sees keys t - behind to t + ahead; None: no limit.
        cu_seqlens: cumulative lengths of documents (0, l1, l1 + l2, ..., T); query t sees only keys
            of its document.

    Returns:
        out ``[B, T, H, D]`` and lse ``[B, T, H]``, the log of each row's sum of exponentials.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = _scores(q, k, scale=scale)  # [B, K, G, T, S]

    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)  # [T, S]
    behind, ahead = window
    if causal:
        visible = visible.tril()
    if behind is not None:
        visible = visible.triu(-behind)
    if ahead is not None:
        visible = visible.tril(ahead)
    if cu_seqlens is not None:
        position = torch.arange(q.shape[1], device=q.device)
        document_starts = torch.tensor(cu_seqlens, device=q.device)
        document = torch.bucketize(position, document_starts, right=True)  # [T]
        visible = visible & (document[:, None] == document)

    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [B, K, G, T]
    probabilities = torch.exp(scores - lse[..., None])
    out = torch.einsum("bkgts,bskd->btkgd", probabilities, v)
    return out.flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)  # [B, T, H, D], [B, T, H]


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of one block in float32 or wider; shapes as in ``attention``."""
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    q = q.to(accum_dtype)
    k = k.to(accum_dtype)
    v = v.to(accum_dtype)
    return attention(q, k, v, causal=causal, scale=scale)


def block_backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
    """Compute the gradients of one block in float32 or wider (FlashAttention 2, algorithm 2).

    The probabilities use the global lse of the rows, over all their keys. So the gradients of
    blocks with other keys add up to the gradients of the whole attention.
    """
    accum_dtype = torch.promote_types(rows.q.dtype, torch.float32)
    q, dout, out, lse, k, v = (x.to(accum_dtype) for x in (*rows, *keys))
    groups = (k.shape[2], q.shape[2] // k.shape[2])  # K, G

    scores = _scores(q, k, scale=scale)  # [B, K, G, T, S]
    if causal:
        above_diagonal = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above_diagonal, float("-inf"))
    probabilities = torch.exp(scores - _grouped(lse, groups)[..., None])

    grouped_dout = dout.unflatten(2, groups)  # [B, T, K, G, D]
    delta = _grouped((dout * out).sum(-1), groups)  # [B, K, G, T]
    dv = torch.einsum("bkgts,btkgd->bskd", probabilities, grouped_dout)
    dprobabilities = torch.einsum("btkgd,bskd->bkgts", grouped_dout, v)
    dscores = probabilities * (dprobabilities - delta[..., None]) * scale
    dq = torch.einsum("bkgts,bskd->btkgd", dscores, k).flatten(2, 3)  # [B, T, H, D]
    dk = torch.einsum("bkgts,btkgd->bskd", dscores, q.unflatten(2, groups))
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    groups = (k.shape[2], q.shape[2] // k.shape[2])  # K, G
    grouped_q = q.unflatten(2, groups)  # [B, T, K, G, D]
    return torch.einsum("btkgd,bskd->bkgts", grouped_q, k) * scale  # [B, K, G, T, S]


def _grouped(x: Tensor, groups: tuple[int, int]) -> Tensor:
    return x.unflatten(2, groups).permute(0, 2, 3, 1)  # [B, T, H] -> [B, K, G, T]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute linear attention with all scores in memory; differentiable.

    Everything is computed in the dtype of the inputs. Arguments, results and shapes as in
    ``kernels.ops.linear_attention``.
    """
    length = q.shape[1]
    if cu_seqlens is None:
        cu_seqlens = (0, length)
    document_ends = torch.tensor(cu_seqlens[1:], device=q.device)
    position = torch.arange(length, device=q.device)
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    rates = torch.tensor(log_decay, dtype=accum_dtype, device=q.device)  # [H]

    def decay(distance: Tensor, visible: Tensor) -> Tensor:
        """Return decay^distance [H, ...] of distances [...], and 0 if not ``visible``."""
        distance = distance.clamp(min=0).to(rates.dtype)
        exponents = rates.view(-1, *[1] * distance.ndim) * distance
        return exponents.exp().where(visible, 0).to(q.dtype)

    # A token sees itself and earlier tokens of its own document.
    document = torch.bucketize(position, document_ends, right=True)  # [T]
    distance = position[:, None] - position  # [T, S]
    visible = (distance >= 0) & (document[:, None] == document)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * decay(distance, visible)
    out = torch.einsum("bhts,bshe->bthe", scores, v)
    weights = decay(length - 1 - position, document == document[-1])  # [H, S]
    final = torch.einsum("bshd,bshe,hs->bhde", k, v, weights)

    # The first document reads the incoming state, and the last passes it on if it is also the
    # first.
    if state is not None:
        state = state.to(q.dtype)
        state_decay = decay(position + 1, document == 0)  # [H, T]
        out = out + torch.einsum("bthd,bhde,ht->bthe", q, state, state_decay)
        total_decay = decay(torch.tensor(length, device=q.device), document[-1] == 0)  # [H]
        final = final + state * total_decay[:, None, None]
    return out, final.to(rates.dtype)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule token by token; differentiable.

    Everything is computed in the widest dtype of the inputs. Arguments, results and shapes as in
    ``kernels.ops.delta_rule``.
    """
    out_dtype = v.dtype
    widest = torch.promote_types(torch.promote_types(v.dtype, g.dtype), beta.dtype)
    q, k, v, g, beta = (x.to(widest) for x in (q, k, v, g, beta))

    value_heads_per_key = v.shape[2] // k.shape[2]
    q = q.repeat_interleave(value_heads_per_key, 2)  # [B, T, H, D]
    k = k.repeat_interleave(value_heads_per_key, 2)
    if g.ndim == 3:
        g = g[..., None]
    gates = g.exp()  # [B, T, H, 1 or D]
    if state is None:
        running = k.new_zeros(*v.shape[:1], *k.shape[2:], v.shape[-1])  # [B, H, D, E]
    else:
        running = state.to(q.dtype)

    outputs = []
    for t in range(q.shape[1]):
        if t and t in (cu_seqlens or ()):
            running = torch.zeros_like(running)
        running = running * gates[:, t, :, :, None]
        current = torch.einsum("bhd,bhde->bhe", k[:, t], running)  # the value at this key
        change = beta[:, t, :, None] * (v[:, t] - current)
        running = running + k[:, t, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], running))
    final = running.to(torch.promote_types(widest, torch.float32))
    return torch.stack(outputs, 1).to(out_dtype), final
