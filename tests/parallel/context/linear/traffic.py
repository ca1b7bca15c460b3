"""Bytes of a delta rule's rounds, counted from its plan."""

from parallel.context import Traffic
from parallel.context.linear.schedules import rounds_of


def delta_traffic(plan, rank, state, square, *, gradient):
    """Return the bytes that ``rank`` sends in a delta rule, or (``gradient``) in its backward.

    ``state`` is the bytes of U, a matrix of key width by value width per row and head; ``square`` those of M, of key
    width by key width. Both are in float32 or wider.
    """
    sent = Traffic()
    for leaving, _ in rounds_of(plan, rank, gradient=gradient):
        for message in leaving:
            if message.peer != rank:
                sent.p2p[message.peer] += state + square * (not message.state)
    return sent
