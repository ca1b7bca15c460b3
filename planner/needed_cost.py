"""What travels, and when, where only the rows that a query sees do: packed documents, windows, exchange."""

from typing import NamedTuple

import numpy as np

from parallel.context.plan import Plan
from parallel.context.traffic import Moves, Sizes, needed_traffic, parcels


class Sent(NamedTuple):
    """Bytes and (possibly fractional) messages from each of ``ranks`` to its peer, both int64 ``[n]``."""

    ranks: np.ndarray
    peers: np.ndarray
    size: float | np.ndarray
    messages: float | np.ndarray


def slots(plan: Plan, of: Sizes, moves: Moves, *, gradients: bool) -> list[Sent]:
    """Return what is in transit in every round of a forward or (``gradients``) a backward, and after the last.

    A parcel's bytes are spread over the rounds until the one that needs it.
    """
    flow = plan.flow(moves)
    entries: list[list[tuple[int, int, float, float]]] = [[] for _ in range(flow.rounds + 1)]
    for rank in range(plan.size):
        for parcel, size, under_way in parcels(flow, rank, of, moves, gradients=gradients):
            part = len(under_way)
            for index in under_way:
                entries[index].append((rank, parcel.peer, size / part, 1 / part))
    columns = (np.array(found, dtype=np.float64).reshape(-1, 4).T for found in entries)
    return [Sent(ranks.astype(np.int64), peers.astype(np.int64), *rest) for ranks, peers, *rest in columns]


def needed_of_all(plan: Plan, of: Sizes, moves: Moves | None, ranks_per_node: int) -> tuple[int, int]:
    """Return the bytes of all ranks (within nodes, between nodes), in a backward, or (None) in a forward."""
    flow, inside, between = plan.flow(moves or "kv"), 0, 0
    for rank in range(plan.size):
        sent = needed_traffic(flow, rank, of, moves)
        beyond = sent.between_nodes(rank, ranks_per_node)
        inside, between = inside + sent.total - beyond, between + beyond
    return inside, between


def most_rows_held(plan: Plan, moves: Moves) -> int:
    """Return the most rows that any place holds in all rounds together."""
    flow = plan.flow(moves)
    places = range(flow.geometry.shape.size)
    return max(sum(flow.held(index, place).length for index in range(flow.rounds)) for place in places)
