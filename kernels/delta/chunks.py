"""Run the gated delta rule over a slab (a range of chunks) in torch, forward and backward.

Token by token the rule is a chain of small matmuls. Within a chunk of C tokens it unrolls to one
triangular system (the WY form of a product of Householder-like factors; Yang et al. 2024,
arXiv:2406.06484 and 2412.06464). A token changes the state by its own value minus the value that
the state holds at its key. The state then consists of S, from before the chunk, and of the changes
by the chunk's earlier tokens. With a_ij = k_i . k_j (j < i) and P_ij = q_i . k_j (j <= i), both
decayed from token j to i, and T = (I + Diag(beta) a)^-1,

    changes = T (beta V) - T (beta K_in) S
    out     = Q_in S + P changes
    S'      = decay S + K_out^T changes

where K_in and Q_in are decayed from the chunk's start to their token, and K_out from its token to
the chunk's end. Everything that does not depend on S is computed for all chunks of the slab at
once, in large matmuls; only changes and S' go from chunk to chunk.

A decay is the exponential of a sum over just the tokens that it spans, never a quotient or a
difference of sums, so a strong gate costs later tokens no precision.

Shapes: N chunks, G sequences times key heads, n value heads per key head, R = G n, D and E the
widths of keys and values; gates are ``[..., C, 1]``, or ``[..., C, D]`` if each channel has its own
gate; n is then 1.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.delta.pairs import (
    decayed_products,
    decayed_products_backward,
    inverse_of_unit_lower,
    sums_after,
    sums_before,
    sums_from,
)
from runtime.tensors import accum_dtype

CHUNK = 64


class ChunkTerms(NamedTuple):
    """Terms of the formulas above for all chunks of a slab; none depends on a state."""

    q: Tensor
    """``[N, G, 1, C, D]``, like ``k``; float32 or wider, like all tensors here."""
    k: Tensor
    v: Tensor
    """``[N, G, n, C, E]``."""
    g: Tensor
    beta: Tensor
    """``[N, G, n, C, 1]``."""
    decay_in: Tensor
    """Decay from the chunk's start to each token, in the gates' shape."""
    decay_out: Tensor
    """Decay from each token to the chunk's end, in the gates' shape."""
    pair_decay: Tensor | None
    """Decay from column to row ``[N, G, n, C, C]``, 0 above the diagonal; None if each channel has
    its own gate.
    """
    qk: Tensor
    """P of the formulas ``[N, G, n, C, C]``."""
    kk: Tensor
    """a of the formulas ``[N, G, n, C, C]``, strictly lower triangular."""
    inverse: Tensor
    """T of the formulas ``[N, R, C, C]``."""
    q_in: Tensor
    """Q_in of the formulas ``[N, R, C, D]``, like ``k_in`` and ``k_out``."""
    k_in: Tensor
    k_out: Tensor
    k_solved: Tensor
    """T (beta K_in) ``[N, R, C, D]``."""
    chunk_decay: Tensor
    """Decay of a state over a whole chunk, ``[N, R, 1 or D, 1]``."""


def forward(inputs: tuple[Tensor, ...], state: Tensor, out: Tensor, final: Tensor) -> None:
    """Write the outputs of a slab (a range of chunks), and the state after it.

    Args:
        inputs: q, k, v, g and beta as in ``kernels.ops.delta_rule``.
        state: state before the slab ``[B, H, D, W]``. It may have more columns than the values have
            channels; no value enters the additional columns.
        out: ``[B, T, H, W]``, written.
        final: ``[B, H, D, W]``, written.
    """
    terms = _chunk_terms(*inputs)
    extra_columns = state.shape[-1] - terms.v.shape[-1]
    states, changes = _scan_chunks(terms, state, extra_columns)
    chunk_out = terms.q_in @ states[:-1]  # [N, R, C, W]
    chunk_out.flatten(0, 1).baddbmm_(terms.qk.flatten(0, 2), changes.flatten(0, 1))
    out.copy_(_unchunked(chunk_out, out.shape))
    final.copy_(states[-1].view_as(state))


def backward(
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    dfinal: Tensor,
    state: Tensor,
    gradients: tuple[Tensor, ...],
) -> Tensor:
    """Write the gradients of a slab's inputs; return the gradient of the state before the slab.

    Args:
        inputs: q, k, v, g and beta.
        dfinal: gradient of the state after the slab.
        state: state before the slab ``[B, H, D, E]``.
        gradients: tensors of the inputs' shapes, written.
    """
    *chunk_gradients, dstate = _gradients(_chunk_terms(*inputs), dout, dfinal, state)
    for gradient, chunk_gradient in zip(gradients, chunk_gradients, strict=True):
        gradient.copy_(_unchunked(chunk_gradient, gradient.shape))
    return dstate


def _scan_chunks(terms: ChunkTerms, state: Tensor, extra_columns: int = 0) -> tuple[Tensor, Tensor]:
    """Run through the chunks of a slab, first to last.

    Returns:
        The states ``[N + 1, R, D, E]`` before each chunk and after the last, and the values that
        each token adds to the state at its key, ``[N, R, C, E]``.
    """
    values = F.pad(terms.v * terms.beta, (0, extra_columns)).flatten(1, 2)  # [N, R, C, W]
    changes = terms.inverse @ values
    states = changes.new_empty(len(changes) + 1, *state.flatten(0, 1).shape)
    states[0] = state.flatten(0, 1)
    k_out = terms.k_out.transpose(-1, -2)  # [N, R, D, C]
    for n in range(len(changes)):
        changes[n].baddbmm_(terms.k_solved[n], states[n], alpha=-1)
        torch.mul(terms.chunk_decay[n], states[n], out=states[n + 1])
        states[n + 1].baddbmm_(k_out[n], changes[n])
    return states, changes


def _scan_chunks_backward(
    terms: ChunkTerms, states: Tensor, dout: Tensor, dfinal: Tensor
) -> tuple[Tensor, Tensor]:
    """Run back through the chunks of a slab, given the states of ``_scan_chunks``.

    Returns:
        The gradients of the states before each chunk and after the last ``[N + 1, R, D, E]``, and
        of the changes ``[N, R, C, E]``.
    """
    dchanges = terms.qk.flatten(1, 2).transpose(-1, -2) @ dout
    dstates = torch.empty_like(states)
    dstates[-1] = dfinal.flatten(0, 1)
    torch.matmul(terms.q_in.transpose(-1, -2), dout, out=dstates[:-1])
    k_solved = terms.k_solved.transpose(-1, -2)  # [N, R, D, C]
    for n in reversed(range(len(dchanges))):
        dchanges[n].baddbmm_(terms.k_out[n], dstates[n + 1])
        dstates[n].addcmul_(terms.chunk_decay[n], dstates[n + 1])
        dstates[n].baddbmm_(k_solved[n], dchanges[n], alpha=-1)
    return dstates, dchanges


def _gradients(
    terms: ChunkTerms, dout: Tensor, dfinal: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta in chunks, and of the state before the slab."""
    states, changes = _scan_chunks(terms, state)
    key_heads = terms.q.shape[1] // len(dout)
    dout = _chunked(dout, key_heads).flatten(1, 2)  # [N, R, C, E]
    dstates, dchanges = _scan_chunks_backward(terms, states, dout, dfinal)
    groups = terms.v.shape[1:3]  # G, n
    states = states[:-1]
    states_t = states.transpose(-1, -2)  # [N, R, E, D]
    changes_t = changes.transpose(-1, -2)  # [N, R, E, C]
    dstates_after = dstates[1:]

    # Backward through the triangular system; its right side is beta (V - K_in S).
    dsolved = terms.inverse.transpose(-1, -2) @ dchanges  # [N, R, C, E]
    dbeta = dsolved * (terms.v.flatten(1, 2) - terms.k_in @ states)
    dbeta = dbeta.sum(-1, keepdim=True).unflatten(1, groups)
    dsystem = -(dsolved @ changes_t).tril_(-1).unflatten(1, groups)  # [N, G, n, C, C]
    dbeta += (dsystem * terms.kk).sum(-1, keepdim=True)
    dqk = (dout @ changes_t).tril_().unflatten(1, groups)

    # Backward through Q_in, K_in and K_out.
    dv = dsolved.unflatten(1, groups) * terms.beta
    dq_in = (dout @ states_t).unflatten(1, groups) * terms.decay_in
    dk_in = (dv.flatten(1, 2) @ states_t).unflatten(1, groups) * -terms.decay_in
    dk_out = (changes @ dstates_after.transpose(-1, -2)).unflatten(1, groups) * terms.decay_out

    dq, dk, dg = decayed_products_backward(
        terms.q, terms.k, terms.g, terms.pair_decay, terms.qk, terms.kk, dqk, dsystem * terms.beta
    )
    dq = dq + dq_in.sum(2, keepdim=True)
    dk = dk + (dk_in + dk_out).sum(2, keepdim=True)

    # The gradients of the gates follow from those of the vectors that the decays multiply, so no
    # exponential is differentiated. A gate's gradient sums just the terms whose decay spans the
    # gate. A difference of two longer sums would keep their rounding errors, which are many times a
    # strong gate's gradient.
    from_start = _per_gate(dq_in * terms.q + dk_in * terms.k, terms)
    to_end = _per_gate(dk_out * terms.k, terms)
    dg += sums_from(from_start) + sums_before(to_end)
    del from_start, to_end  # with gates per channel, they are as large as all keys
    whole_chunk = (terms.chunk_decay * states * dstates_after).sum(-1)  # [N, R, D]
    whole_chunk = whole_chunk[..., None, :].unflatten(1, groups)  # [N, G, n, 1, D]
    dg = dg + _per_gate(whole_chunk, terms)
    return dq, dk, dv, dg, dbeta, dstates[0].view_as(state)


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> ChunkTerms:
    """Compute the terms of all chunks of a slab, given its inputs ``[B, T, H, ...]``."""
    key_heads = q.shape[2]
    if g.ndim == 3:
        g = g[..., None]
    q = _chunked(q, key_heads)
    k = _chunked(k, key_heads)
    v = _chunked(v, key_heads)
    g = _chunked(g, key_heads)
    beta = _chunked(beta[..., None], key_heads)

    pair_decay = None
    if g.shape[-1] == 1:  # column j of row i sums gates j + 1 to i
        pair_decay = g.expand(*g.shape[:-1], CHUNK).tril(-1).cumsum_(-2).exp_().tril_()
    qk = decayed_products(q, k, g, pair_decay)
    kk = decayed_products(k, k, g, pair_decay).tril_(-1)
    decay_in = g.cumsum(-2).exp_()
    decay_out = sums_after(g).exp_()

    inverse = inverse_of_unit_lower(beta * kk).flatten(1, 2)
    k_in = k * decay_in
    return ChunkTerms(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        decay_in=decay_in,
        decay_out=decay_out,
        pair_decay=pair_decay,
        qk=qk,
        kk=kk,
        inverse=inverse,
        k_solved=inverse @ (beta * k_in).flatten(1, 2),
        chunk_decay=decay_in[..., -1:, :].flatten(1, 2).transpose(-1, -2),
        q_in=(q * decay_in).flatten(1, 2),
        k_in=k_in.flatten(1, 2),
        k_out=(k * decay_out).flatten(1, 2),
    )


def _chunked(x: Tensor, key_heads: int) -> Tensor:
    """Map ``[B, T, H, X]`` to ``[N, G, n, C, X]`` in float32 or wider.

    The last chunk is padded with zeros: a key of 0 with beta 0 and a gate of exp(0) = 1 changes no
    state.
    """
    padding = -x.shape[1] % CHUNK
    x = F.pad(x, (0, 0, 0, 0, 0, padding)).to(accum_dtype(x.dtype))
    x = x.unflatten(2, (key_heads, -1)).unflatten(1, (-1, CHUNK))  # [B, N, C, Hk, n, X]
    return x.permute(1, 0, 3, 4, 2, 5).flatten(1, 2).contiguous()


def _unchunked(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo ``_chunked``: map ``[N, ..., C, X]`` to ``shape``, ``[B, T, H, X]`` or ``[B, T, H]``."""
    batch, length = shape[:2]
    x = x.flatten(1, -3).unflatten(1, (batch, -1))  # [N, B, H, C, X]
    x = x.permute(1, 0, 3, 2, 4).flatten(1, 2)  # [B, N C, H, X]
    return x[:, :length].reshape(shape)


def _per_gate(x: Tensor, terms: ChunkTerms) -> Tensor:
    """Sum x over channels if all channels share a gate."""
    return x if terms.g.shape[-1] > 1 else x.sum(-1, keepdim=True)
