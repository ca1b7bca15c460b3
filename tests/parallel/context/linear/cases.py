"""Layouts and documents that linear attention is tested in, and its gradients.

Bytes of a delta rule's rounds are here too.
"""

import torch

from parallel.context import Traffic
from parallel.context.linear.segments import rounds_of

CU_SEQLENS = (0, 3, 40, 41, 131, 251)


def with_gradients(function, tensors):
    """The result and the gradients of all tensors but the last, the result's own gradient."""
    *leaves, dout = tensors
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def delta_traffic(plan, rank, state, square, *, gradient):
    """Return the bytes that ``rank`` sends in a delta rule, or (``gradient``) in its backward.

    ``state`` is the bytes of U, a matrix of key width by value width per row and head; ``square``
    those of M, of key width by key width. Both are in float32 or wider.
    """
    sent = Traffic()
    for leaving, _ in rounds_of(plan, rank, gradient=gradient):
        for message in leaving:
            if message.peer != rank:
                sent.p2p[message.peer] += state + square * (not message.state)
    return sent
