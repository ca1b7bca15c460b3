"""Naive softmax and linear attention: the reference for every fast path.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head
width. Linear attention has one key head per query head, keys of width D and values of width E.
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
    documents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention with all scores materialised, in the dtype of the inputs;
    differentiable.

    Args:
        q: ``[B, T, H, D]``.
        k, v: ``[B, S, K, D]``. T == S unless query t may see every key.
        causal: query t sees keys 0..t.
        scale: factor of the scores; default 1 / sqrt(D).
        window: (behind, ahead); query t sees keys t - behind to t + ahead; None: no limit.
        documents: cumulative lengths (0, l1, l1 + l2, ..., T); query t sees keys of its document
            alone.

    Returns:
        out ``[B, T, H, D]`` and lse ``[B, T, H]``, the log of each row's sum of exponentials.
    """
    scores = _scores(q, k, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)  # [T, S]
    behind, ahead = window
    if causal:
        seen = seen.tril()
    if behind is not None:
        seen = seen.triu(-behind)
    if ahead is not None:
        seen = seen.tril(ahead)
    if documents is not None:
        place = torch.arange(q.shape[1], device=q.device)
        document = torch.bucketize(place, torch.tensor(documents, device=q.device), right=True)
        seen = seen & (document[:, None] == document)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [B, K, G, T]
    out = torch.einsum("bkgts,bskd->btkgd", torch.exp(scores - lse[..., None]), v)
    return out.flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)  # lse [B, K, G, T] -> [B, T, H]


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of one block in float32 or wider; shapes as in ``attention``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return attention(q.to(wide), k.to(wide), v.to(wide), causal=causal, scale=scale)


def block_backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
    """Compute the gradients of one block in float32 or wider (FlashAttention 2, algorithm 2)."""
    wide = torch.promote_types(rows.q.dtype, torch.float32)
    q, dout, out, lse, k, v = (x.to(wide) for x in (*rows, *keys))
    groups = (k.shape[2], q.shape[2] // k.shape[2])
    scores = _scores(q, k, scale=scale)
    if causal:
        scores = scores.masked_fill(
            torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")
        )
    probabilities = torch.exp(scores - _from_rows(lse, groups)[..., None])
    grouped_dout = dout.unflatten(2, groups)  # [B, T, K, G, D]
    delta = _from_rows((dout * out).sum(-1), groups)  # [B, K, G, T]
    dv = torch.einsum("bkgts,btkgd->bskd", probabilities, grouped_dout)
    dprobabilities = torch.einsum("btkgd,bskd->bkgts", grouped_dout, v)
    dscores = probabilities * (dprobabilities - delta[..., None]) * scale
    dq = torch.einsum("bkgts,bskd->btkgd", dscores, k).flatten(2, 3)
    dk = torch.einsum("bkgts,btkgd->bskd", dscores, q.unflatten(2, groups))
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Return scaled scores ``[B, K, G, T, S]``, G = H / K query heads per key/value head."""
    groups = (k.shape[2], q.shape[2] // k.shape[2])
    return torch.einsum("btkgd,bskd->bkgts", q.unflatten(2, groups), k) * scale


def _from_rows(x: Tensor, groups: tuple[int, int]) -> Tensor:
    return x.unflatten(2, groups).permute(0, 2, 3, 1)  # [B, T, H] -> [B, K, G, T]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    *,
    documents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute linear attention with all scores materialised, in the dtype of the inputs;
    differentiable.

    Arguments, results and shapes as in ``kernels.linear_attention.linear_attention``.
    """
    length = q.shape[1]
    bounds = torch.tensor(documents or (0, length), device=q.device)
    place = torch.arange(length, device=q.device)
    rates = torch.tensor(
        log_decay, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
    )  # [H]

    def decay(distance: Tensor, seen: Tensor) -> Tensor:
        """Return decay^distance [H, ...] of distances [...]; 0 where not ``seen``."""
        distance = distance.clamp(min=0).to(rates.dtype)
        return (rates.view(-1, *[1] * distance.ndim) * distance).exp().where(seen, 0).to(q.dtype)

    document = torch.bucketize(place, bounds[1:], right=True)
    distance = place[:, None] - place  # [T, S]
    seen = (distance >= 0) & (document[:, None] == document)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * decay(distance, seen)
    out = torch.einsum("bhts,bshe->bthe", scores, v)
    weights = decay(length - 1 - place, document == document[-1])
    final = torch.einsum("bshd,bshe,hs->bhde", k, v, weights)
    if state is not None:
        state = state.to(q.dtype)
        out = out + torch.einsum("bthd,bhde,ht->bthe", q, state, decay(place + 1, document == 0))
        final = (
            final
            + state * decay(torch.tensor(length, device=q.device), document[-1] == 0)[:, None, None]
        )
    return out, final.to(rates.dtype)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    documents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule token by token, in the widest dtype of the inputs;
    differentiable.

    Arguments, results and shapes as in ``kernels.delta.rule.delta_rule``.
    """
    shared, dtype = v.shape[2] // k.shape[2], v.dtype
    widest = torch.promote_types(torch.promote_types(v.dtype, g.dtype), beta.dtype)
    q, k, v, g, beta = (x.to(widest) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    gates = (g if g.ndim == 4 else g[..., None]).exp()
    running = (
        k.new_zeros(*v.shape[:1], *k.shape[2:], v.shape[-1]) if state is None else state.to(q.dtype)
    )
    out = []
    for t in range(q.shape[1]):
        if t and t in (documents or ()):
            running = torch.zeros_like(running)
        running = running * gates[:, t, :, :, None]
        held = torch.einsum("bhd,bhde->bhe", k[:, t], running)
        change = beta[:, t, :, None] * (v[:, t] - held)
        running = running + k[:, t, :, :, None] * change[:, :, None]
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], running))
    return torch.stack(out, 1).to(dtype), running.to(torch.promote_types(widest, torch.float32))
