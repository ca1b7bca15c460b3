"""The gated delta rule of a slab of chunks in torch, on any device, forward and backward.

Within a chunk of C tokens the states unfold to triangular systems (Yang et al. 2024,
arXiv:2406.06484 and 2412.06464): with a_ij = k_i . k_j (j < i) and P_ij = q_i . k_j (j <= i),
decayed from token j to i, and T = (I + Diag(beta) a)^-1,

    changes = T (beta V) - T (beta K_in) S      out = Q_in S + P changes      S' = decay S + K_out^T
    changes

where K_in, Q_in are decayed from the chunk's start to their token, K_out from their token to the
chunk's end. Only the second and the last of these need the chunk before. A decay is the exponential
of a sum over just the tokens that it spans, never a quotient or a difference of sums: a strong gate
costs later tokens no digits.

Shapes: N chunks, G sequences times key heads, n value heads of a key head, R = G n, D and E the
widths of keys and values; gates are ``[..., C, 1]``, or ``[..., C, D]`` where each channel has its
own, for which n is 1.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.tensors import accum_dtype

CHUNK = 64
_SOLVED = 16
"""Width of the diagonal blocks that a triangular solver inverts."""


class Parts(NamedTuple):
    """Chunks of one slab, all but their states."""

    q: Tensor
    """``[N, G, 1, C, D]``, as ``k``; float32 or wider, as all here."""
    k: Tensor
    v: Tensor
    """``[N, G, n, C, E]``."""
    g: Tensor
    beta: Tensor
    """``[N, G, n, C, 1]``."""
    into: Tensor
    """Decay from the chunk's start to each token, of the gates' shape; ``out_of``: from each token
    to its end.
    """
    out_of: Tensor
    pair: Tensor | None
    """Decay from column to row ``[N, G, n, C, C]``, 0 above the diagonal; None if each channel has
    its own.
    """
    reads: Tensor
    """P ``[N, G, n, C, C]``."""
    keys: Tensor
    """a ``[N, G, n, C, C]``, strictly lower."""
    inverse: Tensor
    """T ``[N, R, C, C]``."""
    q_in: Tensor
    """Q_in ``[N, R, C, D]``, as ``k_in`` and ``k_out``."""
    k_in: Tensor
    k_out: Tensor
    taken: Tensor
    """T (beta K_in) ``[N, R, C, D]``."""
    through: Tensor
    """Decay of a state over each whole chunk, ``[N, R, 1 or D, 1]``."""


def forward(inputs: tuple[Tensor, ...], state: Tensor, out: Tensor, final: Tensor) -> None:
    """Write a slab's outputs ``[B, T, H, W]`` and the state after it, given the one before ``[B, H,
    D, W]``.

    The state may have more columns than values have; no value enters these.

    Args:
        inputs: q, k, v, g and beta as of ``kernels.delta.rule.delta_rule``.
    """
    parts = _parts(*inputs)
    entering, changes = _states(parts, state, state.shape[-1] - parts.v.shape[-1])
    found = parts.q_in @ entering[:-1]
    found.flatten(0, 1).baddbmm_(parts.reads.flatten(0, 2), changes.flatten(0, 1))
    out.copy_(_tokens(found, out.shape))
    final.copy_(entering[-1].view_as(state))


def backward(
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    dfinal: Tensor,
    state: Tensor,
    found: tuple[Tensor, ...],
) -> Tensor:
    """Write the gradients of a slab's inputs into tensors of their shapes, and return that of the
    state before it.

    Args:
        dfinal: gradient of the state after the slab.
        state: state before it ``[B, H, D, E]``.
    """
    *gradients, dstate = _gradients(_parts(*inputs), dout, dfinal, state)
    for dx, part in zip(found, gradients, strict=True):
        dx.copy_(_tokens(part, dx.shape))
    return dstate


def _states(parts: Parts, state: Tensor, more: int = 0) -> tuple[Tensor, Tensor]:
    """Go through the chunks of a slab.

    Returns:
        The states ``[N + 1, R, D, E]`` before each chunk and after the last, and the values that
        each token adds to the state at its key, ``[N, R, C, E]``.
    """
    values = F.pad(parts.v * parts.beta, (0, more)).flatten(1, 2)
    changes = parts.inverse @ values
    entering = changes.new_empty(len(changes) + 1, *state.flatten(0, 1).shape)
    entering[0] = state.flatten(0, 1)
    given = parts.k_out.transpose(-1, -2)
    for n in range(len(changes)):
        changes[n].baddbmm_(parts.taken[n], entering[n], alpha=-1)
        torch.mul(parts.through[n], entering[n], out=entering[n + 1])
        entering[n + 1].baddbmm_(given[n], changes[n])
    return entering, changes


def _gradients(parts: Parts, dout: Tensor, dfinal: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g and beta in chunks, and of the state before the slab."""
    entering, changes = _states(parts, state)
    dout = _chunked(dout, parts.q.shape[1] // len(dout)).flatten(1, 2)
    # The gradients of states and changes, the last chunk first.
    dchanges = parts.reads.flatten(1, 2).transpose(-1, -2) @ dout
    leaving = torch.empty_like(entering)
    leaving[-1] = dfinal.flatten(0, 1)
    torch.matmul(parts.q_in.transpose(-1, -2), dout, out=leaving[:-1])
    back = parts.taken.transpose(-1, -2)
    for n in reversed(range(len(dchanges))):
        dchanges[n].baddbmm_(parts.k_out[n], leaving[n + 1])
        leaving[n].addcmul_(parts.through[n], leaving[n + 1]).baddbmm_(
            back[n], dchanges[n], alpha=-1
        )

    entering, after = entering[:-1], leaving[1:]
    dsolved = parts.inverse.transpose(-1, -2) @ dchanges  # of beta (V - K_in S)
    turned, groups = entering.transpose(-1, -2), parts.v.shape[1:3]
    dbeta = (
        (dsolved * (parts.v.flatten(1, 2) - parts.k_in @ entering))
        .sum(-1, keepdim=True)
        .unflatten(1, groups)
    )
    dsystem = -(dsolved @ changes.transpose(-1, -2)).tril_(-1).unflatten(1, groups)
    dbeta += (dsystem * parts.keys).sum(-1, keepdim=True)
    dreads = (dout @ changes.transpose(-1, -2)).tril_().unflatten(1, groups)
    dv = dsolved.unflatten(1, groups) * parts.beta
    dq_in = (dout @ turned).unflatten(1, groups) * parts.into
    dk_in = (dv.flatten(1, 2) @ turned).unflatten(1, groups) * -parts.into
    dk_out = (changes @ after.transpose(-1, -2)).unflatten(1, groups) * parts.out_of
    dq, dk, dg = _pairs_backward(parts, dreads, dsystem * parts.beta)
    dq, dk = dq + dq_in.sum(2, keepdim=True), dk + (dk_in + dk_out).sum(2, keepdim=True)
    # A decay acts only through the vectors that it multiplies: no exponential is differentiated. A
    # gate sums just what crosses it: of what ends before it or begins after it, a difference would
    # leave the rounding, many times a strong gate's gradient.
    dg += _from(_summed(dq_in * parts.q + dk_in * parts.k, parts)) + _before(
        _summed(dk_out * parts.k, parts)
    )
    kept = (
        (parts.through * entering * after).sum(-1)[..., None, :].unflatten(1, groups)
    )  # [N, G, n, 1, D]
    return dq, dk, dv, dg + _summed(kept, parts), dbeta, leaving[0].view_as(state)


def _parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Parts:
    heads = q.shape[2]
    q, k, v = (_chunked(x, heads) for x in (q, k, v))
    g, beta = (_chunked(x if x.ndim == 4 else x[..., None], heads) for x in (g, beta))
    pair = None
    if g.shape[-1] == 1:  # the sums of gates j + 1 to i
        pair = g.expand(*g.shape[:-1], CHUNK).tril(-1).cumsum_(-2).exp_().tril_()
    reads, keys = _pairs(q, k, g, pair), _pairs(k, k, g, pair).tril_(-1)
    into, out_of = g.cumsum(-2).exp_(), _after(g).exp_()
    inverse = _inverse(beta * keys).flatten(1, 2)
    k_in = k * into
    taken = inverse @ (beta * k_in).flatten(1, 2)
    through = into[..., -1:, :].flatten(1, 2).transpose(-1, -2)
    q_in, k_in, k_out = (x.flatten(1, 2) for x in (q * into, k_in, k * out_of))
    return Parts(
        q,
        k,
        v,
        g,
        beta,
        into,
        out_of,
        pair,
        reads,
        keys,
        inverse,
        q_in,
        k_in,
        k_out,
        taken,
        through,
    )


def _inverse(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 of a strictly lower matrix ``[..., C, C]``, by halves.

    Every block of the inverse is bounded by 2 if beta is; the powers of ``lower`` that a product of
    squares sums are not (equal keys: an error of 1e9).
    """
    eye = torch.eye(_SOLVED, dtype=lower.dtype, device=lower.device)
    blocks = _blocks(lower, _SOLVED, 0, 0, 1)
    found = torch.linalg.solve_triangular(
        blocks + eye, eye.expand_as(blocks), upper=False, unitriangular=True
    )
    while (size := found.shape[-1]) < CHUNK:
        first, second = found[..., ::2, :, :], found[..., 1::2, :, :]
        below = -(second @ _blocks(lower, size, 1, 0, 2) @ first)
        found = torch.cat((F.pad(first, (0, size)), torch.cat((below, second), -1)), -2)
    return found.squeeze(-3)


def _blocks(matrix: Tensor, size: int, row: int, column: int, of: int) -> Tensor:
    """Return a view of the blocks ``[..., M, size, size]`` at (row, column) of M squares of ``of``
    blocks a side.
    """
    squares = matrix.unflatten(-1, (-1, of, size)).unflatten(-4, (-1, of, size))
    return squares[..., row, :, :, column, :].diagonal(0, -4, -2).movedim(-1, -3)


def _pairs(x: Tensor, k: Tensor, g: Tensor, pair: Tensor | None) -> Tensor:
    """Return x_i . k_j, decayed from j to i, ``[N, G, n, C, C]``; 0 above the diagonal."""
    if pair is not None:
        return x @ k.transpose(-1, -2) * pair
    found = torch.diag_embed((x * k).sum(-1))
    for half in _halves():
        rows, columns = _decayed_halves(x, k, g, half)
        _blocks(found, half, 1, 0, 2).copy_(rows @ columns.transpose(-1, -2))
    return found


def _pairs_backward(parts: Parts, dreads: Tensor, dkeys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the gradients of P and a give q, k (summed over n) and the gates."""
    q, k, g, pair = parts.q, parts.k, parts.g, parts.pair
    if pair is not None:
        through = dreads * parts.reads + dkeys * parts.keys
        crossing = through @ torch.ones_like(through[0, 0, 0]).triu_(
            1
        )  # from before token j, for each i
        dg = crossing.tril_().sum(-2)[..., None]
        dreads, dkeys = ((x * pair).sum(2, keepdim=True) for x in (dreads, dkeys))
        dk = dkeys @ k + dkeys.transpose(-1, -2) @ k + dreads.transpose(-1, -2) @ q
        return dreads @ k, dk, dg
    diagonal = dreads.diagonal(0, -2, -1)[..., None]
    dq, dk, dg = diagonal * k, diagonal * q, torch.zeros_like(g)
    for half in _halves():
        into, out_of = (x.exp() for x in _half_sums(g, half))
        _, k_out = _decayed_halves(k, k, g, half)
        (_, q_late), (early, k_late), (_, dq_late), (dk_early, dk_late), (dg_early, dg_late) = (
            x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, dq, dk, dg)
        )
        reads, keys = (_blocks(x, half, 1, 0, 2) for x in (dreads, dkeys))
        to_q, to_k = (block @ k_out * into for block in (reads, keys))
        to_early = reads.transpose(-1, -2) @ (q_late * into) + keys.transpose(-1, -2) @ (
            k_late * into
        )
        to_early *= out_of
        for dx, add in ((dq_late, to_q), (dk_late, to_k), (dk_early, to_early)):
            dx += add
        dg_late += _from((to_q * q_late).addcmul_(to_k, k_late))
        dg_early += _before(to_early * early)
    return dq, dk, dg


def _halves() -> list[int]:
    """Return half the widths of the blocks whose lower left quarters fill a chunk below its
    diagonal.
    """
    return [1 << level for level in range(CHUNK.bit_length() - 1)]


def _half_sums(g: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return sums of gates ``[..., M, half, D]`` in blocks of two halves: from the middle to each
    token, and back.
    """
    early, late = g.unflatten(-2, (-1, 2, half)).unbind(-3)
    return late.cumsum(-2), _after(early)


def _decayed_halves(x: Tensor, k: Tensor, g: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the later halves of x decayed from their blocks' middles, and the earlier ones of k up
    to them.
    """
    into, out_of = _half_sums(g, half)
    late, early = (y.unflatten(-2, (-1, 2, half)) for y in (x, k))
    return late[..., 1, :, :] * into.exp(), early[..., 0, :, :] * out_of.exp()


def _from(x: Tensor) -> Tensor:
    """Return the sums of x over each token and those after it."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _after(x: Tensor) -> Tensor:
    """Return the sums of x after each token."""
    return _from(F.pad(x[..., 1:, :], (0, 0, 0, 1)))


def _before(x: Tensor) -> Tensor:
    """Return the sums of x before each token."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


def _chunked(x: Tensor, heads: int) -> Tensor:
    """Map ``[B, T, H, X]`` to ``[N, G, n, C, X]`` in float32 or wider, padded with zeros, which
    change no state.
    """
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK)).to(accum_dtype(x.dtype))
    x = x.unflatten(2, (heads, -1)).unflatten(1, (-1, CHUNK))  # [B, N, C, Hk, n, X]
    return x.permute(1, 0, 3, 4, 2, 5).flatten(1, 2).contiguous()


def _tokens(x: Tensor, shape: torch.Size) -> Tensor:
    """Map ``[N, ..., C, X]`` back to ``shape``, ``[B, T, H, X]`` or ``[B, T, H]``."""
    x = (
        x.flatten(1, -3)
        .unflatten(1, (shape[0], -1))
        .permute(1, 0, 3, 2, 4)
        .flatten(1, 2)[:, : shape[1]]
    )
    return x.reshape(shape)


def _summed(x: Tensor, parts: Parts) -> Tensor:
    """Sum over channels if they share a gate."""
    return x if parts.g.shape[-1] > 1 else x.sum(-1, keepdim=True)
