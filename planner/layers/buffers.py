"""Count the buffers of attention's backward pass, in bytes per rank.

A backward pass allocates its results and, depending on the method, the tensors that circulate or
are gathered, with their gradients. A forward pass needs less and is not counted.
"""

from functools import lru_cache

from parallel.context.plan import Plan
from parallel.context.sparse.rows import length_of
from parallel.context.traffic import (
    Moves,
    Sizes,
)

CIRCULATING_BUFFERS = 1.75
"""Number of buffers of a circulating gradient per holder, from the third round on.

One buffer is accumulated and one arrives; the one that was sent is freed while the next arrives.
The value is fitted to rehearsals.
"""


@lru_cache(maxsize=4096)
def backward_buffers(plan: Plan, sizes: Sizes, moves: Moves) -> int:
    """Count the bytes of a backward pass's buffers: results, moving tensors and their gradients.

    A circulating tensor has one copy in use and one in transit; from the third round on, a
    circulating gradient has a third copy, the one that was sent before. Gathered gradients exist
    twice, as sums and as the tensors to send. With stages of heads the buffers are those of one
    stage, including the tensors that it exchanges again (q, dout, out and lse, k and v), plus all
    results and the sums of KV.

    Args:
        moves: the tensors that circulate, ``kv`` or ``queries``; the others are stationary.
    """
    geometry = plan.geometry
    stationary: Moves = "queries" if moves == "kv" else "kv"

    # The operator's results: dq, dk and dv of all heads, in the dtype of q, k and v.
    all_heads = sizes._replace(stages=1)
    gradients = all_heads.gradient("kv") + all_heads.gradient("queries")
    buffers = gradients * sizes.element_size // sizes.wide
    if sizes.stages > 1:
        stage = sizes.stage
        exchanged_bytes = stage.payload("queries") + stage.payload("kv") + stage.gradient("kv")
        return backward_buffers(plan, stage, moves) + exchanged_bytes + buffers

    # Ulysses: the gradient of the exchanged queries is in transit.
    if geometry.ulysses_degree > 1:
        buffers += sizes.gradient("queries") * sizes.element_size // sizes.wide
    if geometry.size == geometry.ulysses_degree:
        return buffers

    # An exchange of needed rows receives all of them at once.
    if geometry.method.needed_only:
        num_rows = _most_received_rows(plan, moves)
        received_bytes = num_rows * (sizes.gradient(moves) + sizes.payload(moves)) // sizes.tokens
        return buffers + received_bytes + sizes.gradient(stationary)

    # A ring or a team: the moving tensors of all holders circulate or are gathered, and teammates
    # share the stationary tensors.
    num_rounds = len(geometry.rounds_of(0))
    num_holders = len(geometry.holders(0))
    num_teammates = len(geometry.teammates(0))
    if num_rounds > 1:
        num_holders = 2 * len(geometry.rounds_of(0)[-1].holds) // geometry.ulysses_degree
    copies: float = 1
    if num_rounds == 1 and num_holders > 1:  # gathered
        copies = 2
    elif num_rounds > 2:
        copies = CIRCULATING_BUFFERS
    buffers += int(copies * num_holders * sizes.gradient(moves))
    if num_teammates == 1:
        buffers += sizes.gradient(stationary)
    else:
        buffers += 2 * num_teammates * sizes.gradient(stationary)

    # With several holders or teammates, their gathered payloads are in memory too.
    if num_holders > 1:
        buffers += num_holders * sizes.payload(moves)
    if num_teammates > 1:
        buffers += num_teammates * sizes.payload(stationary)
    return buffers


def _most_received_rows(plan: Plan, moves: Moves) -> int:
    """Return the number of rows that the busiest rank receives, in all rounds together."""
    flow = plan.flow(moves)
    rows_by_rank = []
    for position in range(flow.geometry.shape.size):
        rows = [length_of(flow.held(index, position)) for index in range(flow.rounds)]
        rows_by_rank.append(sum(rows))
    return max(rows_by_rank)
