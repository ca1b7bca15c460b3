"""Decayed products of all pairs of tokens in a chunk, and the inverse of a chunk's system.

With one gate per head the decay between two tokens is a number, so all products of a chunk are one
matmul, multiplied by a matrix of decays. With one gate per channel the decay is a vector for each
pair, ``[C, C, D]`` in all, many times as large as the inputs. The lower triangle is then divided
into blocks of two halves instead. A vector of the later half is decayed from the block's middle to
its token, and one of the earlier half from its token to the middle. Their product has the decay
between the two tokens. Both factors are at most 1, so nothing overflows, unlike a quotient of
decays. Blocks of 2, 4, ..., C tokens fill everything below the diagonal.

Shapes as in ``kernels.delta.chunks``. In a block of two halves of h tokens, M = C / 2h blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SOLVED = 16
"""Width of the diagonal blocks that a triangular solver inverts directly."""


def decayed_products(x: Tensor, k: Tensor, g: Tensor, pair_decay: Tensor | None) -> Tensor:
    """Return x_i . k_j, decayed from j to i, ``[N, G, n, C, C]``; 0 above the diagonal."""
    if pair_decay is not None:
        return x @ k.transpose(-1, -2) * pair_decay
    products = torch.diag_embed((x * k).sum(-1))
    for half in _halves(g):
        decayed_x = _late(x, half) * _late_decay(g, half)  # [..., M, h, D]
        decayed_k = _early(k, half) * _early_decay(g, half)
        block = decayed_x @ decayed_k.transpose(-1, -2)  # [..., M, h, h]
        _blocks(products, half, 1, 0, 2).copy_(block)
    return products


def decayed_products_backward(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    pair_decay: Tensor | None,
    qk: Tensor,
    kk: Tensor,
    dqk: Tensor,
    dkk: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q and k (summed over n) and of the gates.

    Args:
        qk, kk: the decayed products of q and k, and of k and k.
        dqk, dkk: their gradients.
    """
    if pair_decay is None:
        return _channel_gates_backward(q, k, g, dqk, dkk)

    # The gate of token t is part of the decay of all pairs j < t <= i.
    weighted = dqk * qk + dkk * kk
    before_column = torch.ones_like(weighted[0, 0, 0]).triu_(1)
    crossing = weighted @ before_column  # sums over the columns before j, for each row i
    dg = crossing.tril_().sum(-2)[..., None]
    dqk = (dqk * pair_decay).sum(2, keepdim=True)
    dkk = (dkk * pair_decay).sum(2, keepdim=True)
    dk = dkk @ k + dkk.transpose(-1, -2) @ k + dqk.transpose(-1, -2) @ q
    return dqk @ k, dk, dg


def _channel_gates_backward(
    q: Tensor, k: Tensor, g: Tensor, dqk: Tensor, dkk: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and the gates if each channel has its own gate."""
    diagonal = dqk.diagonal(0, -2, -1)[..., None]
    dq = diagonal * k
    dk = diagonal * q
    dg = torch.zeros_like(g)
    for half in _halves(g):
        late_decay = _late_decay(g, half)
        early_decay = _early_decay(g, half)
        late_q = _late(q, half)
        late_k = _late(k, half)
        early_k = _early(k, half)
        decayed_k = early_k * early_decay

        block_dqk = _blocks(dqk, half, 1, 0, 2)  # [..., M, h, h]
        block_dkk = _blocks(dkk, half, 1, 0, 2)
        add_q = block_dqk @ decayed_k * late_decay
        add_late_k = block_dkk @ decayed_k * late_decay
        from_q = block_dqk.transpose(-1, -2) @ (late_q * late_decay)
        from_k = block_dkk.transpose(-1, -2) @ (late_k * late_decay)
        add_early_k = from_q + from_k
        add_early_k *= early_decay

        # The halves are views of the gradients, so adding to them adds to the gradients.
        _late(dq, half).add_(add_q)
        _late(dk, half).add_(add_late_k)
        _early(dk, half).add_(add_early_k)
        _late(dg, half).add_(sums_from((add_q * late_q).addcmul_(add_late_k, late_k)))
        _early(dg, half).add_(sums_before(add_early_k * early_k))
    return dq, dk, dg


def _halves(g: Tensor) -> list[int]:
    """Return the widths of half a block, for all block sizes: 1, 2, ..., C / 2."""
    chunk = g.shape[-2]
    return [1 << level for level in range(chunk.bit_length() - 1)]


def _early(x: Tensor, half: int) -> Tensor:
    """Return a view of the earlier halves of blocks, ``[..., M, half, D]``."""
    return x.unflatten(-2, (-1, 2, half))[..., 0, :, :]


def _late(x: Tensor, half: int) -> Tensor:
    """Return a view of the later halves of blocks, ``[..., M, half, D]``."""
    return x.unflatten(-2, (-1, 2, half))[..., 1, :, :]


def _early_decay(g: Tensor, half: int) -> Tensor:
    """Return the decay from each token of an earlier half to the middle of its block."""
    return sums_after(_early(g, half)).exp()


def _late_decay(g: Tensor, half: int) -> Tensor:
    """Return the decay from the middle of a block to each token of its later half."""
    return _late(g, half).cumsum(-2).exp()


def sums_from(x: Tensor) -> Tensor:
    """Return, for each token, the sum of x over it and all later tokens."""
    return x.flip(-2).cumsum(-2).flip(-2)


def sums_after(x: Tensor) -> Tensor:
    """Return, for each token, the sum of x over all later tokens."""
    return sums_from(F.pad(x[..., 1:, :], (0, 0, 0, 1)))


def sums_before(x: Tensor) -> Tensor:
    """Return, for each token, the sum of x over all earlier tokens."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)


def inverse_of_unit_lower(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 of a strictly lower triangular matrix ``[..., C, C]``, by halves.

    A solver inverts the diagonal blocks of 16. Two inverted neighbours A and B then make a block of
    twice the size with -B L A at the lower left, where ``lower`` has the block L. Every block of
    the inverse is bounded by 2 if beta is. The powers of ``lower``, which a product of squares
    would sum, are not bounded: with equal keys the error was 1e9.
    """
    eye = torch.eye(SOLVED, dtype=lower.dtype, device=lower.device)
    blocks = _blocks(lower, SOLVED, 0, 0, 1)
    inverse = torch.linalg.solve_triangular(
        blocks + eye, eye.expand_as(blocks), upper=False, unitriangular=True
    )
    while inverse.shape[-1] < lower.shape[-1]:
        size = inverse.shape[-1]
        first = inverse[..., ::2, :, :]
        second = inverse[..., 1::2, :, :]
        below = -(second @ _blocks(lower, size, 1, 0, 2) @ first)
        upper_half = F.pad(first, (0, size))
        lower_half = torch.cat((below, second), -1)
        inverse = torch.cat((upper_half, lower_half), -2)
    return inverse.squeeze(-3)


def _blocks(matrix: Tensor, size: int, row: int, column: int, per_side: int) -> Tensor:
    """Return a view of one block ``[..., M, size, size]`` in each of M squares on the diagonal.

    A square has ``per_side`` blocks per side; the block is at (row, column) of its square.
    """
    squares = matrix.unflatten(-1, (-1, per_side, size)).unflatten(-4, (-1, per_side, size))
    return squares[..., row, :, :, column, :].diagonal(0, -4, -2).movedim(-1, -3)
