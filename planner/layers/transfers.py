"""Messages of one layer's attention over all context-parallel ranks, and the seconds they take.

Messages under way at the same time share links. A rank has a link inside its node; to other nodes
it has its own link or shares the node's. The busiest link decides. The groups of different
tensor-parallel ranks send the same messages, so only one group is computed, and a shared link
counts all groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from parallel.context.plan import Plan
from parallel.context.traffic import (
    Message,
    Moves,
    Sizes,
    needed_traffic,
    parcels,
)
from planner.cluster import MICRO, Cluster


class Sent(NamedTuple):
    """Bytes (``size``) and number of ``messages`` that each rank sends to its peer.

    ``ranks`` and ``peers`` are int64 ``[n]``. A message that is spread over several rounds counts
    as a fraction in each round.
    """

    ranks: np.ndarray
    peers: np.ndarray
    size: float | np.ndarray
    messages: float | np.ndarray


def transfer_seconds(together: Sequence[Sent], num_ranks: int, cluster: Cluster, tp: int) -> float:
    """Return the seconds until the busiest rank, or the busiest node's shared link, has sent all.

    Messages to the same peer share a link's rate, and their latencies add up. Links of all ranks
    work at the same time.

    Args:
        together: messages that are under way at the same time.
        num_ranks: size of the context-parallel group.
        tp: number of such groups that share the links.
    """
    if not together:
        return 0.0
    # Concatenate all messages, [n], then sum them for each pair of rank and peer, [pairs].
    ranks = np.concatenate([sent.ranks for sent in together])
    peers = np.concatenate([sent.peers for sent in together])
    sizes = np.concatenate([np.broadcast_to(sent.size, len(sent.ranks)) for sent in together])
    counts = np.concatenate([np.broadcast_to(sent.messages, len(sent.ranks)) for sent in together])
    pairs, pair_of = np.unique(ranks * num_ranks + peers, return_inverse=True)
    size = np.bincount(pair_of, sizes)
    count = np.bincount(pair_of, counts)
    rank, peer = np.divmod(pairs, num_ranks)

    # Ranks of one node have links of their own inside it; to other nodes they may share one.
    per_node = max(1, cluster.gpus_per_node // tp)
    node = rank // per_node
    peer_node = peer // per_node
    is_inside = (rank != peer) & (node == peer_node)
    is_outside = node != peer_node
    link = rank
    groups_per_link = 1
    if cluster.between_link == "node":  # all tp groups of a node share its link
        link = node
        groups_per_link = tp

    inside_seconds = size[is_inside] / cluster.inside_bytes_per_s
    outside_seconds = size[is_outside] * groups_per_link / cluster.between_bytes_per_s
    latency = np.where(is_inside, cluster.inside_latency_us, cluster.between_latency_us) * MICRO
    busiest = max(
        np.bincount(rank[is_inside], inside_seconds).max(initial=0.0),
        np.bincount(link[is_outside], outside_seconds).max(initial=0.0),
    )
    return busiest + (count * latency)[rank != peer].max(initial=0.0)


def collective_messages(collective: Message) -> Sent:
    """Return the messages of a collective: around a ring (all-gather), or to each peer."""
    members = collective.to  # the group of each rank, [ranks, members]
    num_ranks, num_members = members.shape
    ranks = np.arange(num_ranks)
    if collective.kind == "gather":
        # Around a ring, every rank sends the next rank all parts except the receiver's own.
        own_index = np.argmax(members == ranks[:, None], axis=1)
        following = members[ranks, (own_index + 1) % num_members]
        num_passed = num_members - 1
        return Sent(ranks, following, num_passed * collective.size, num_passed)
    return Sent(np.repeat(ranks, num_members), members.ravel(), collective.size, 1)


def slots(plan: Plan, sizes: Sizes, moves: Moves, *, gradients: bool) -> list[Sent]:
    """Return a sparse exchange's messages under way in each round, and after the last.

    A sparse exchange (packed documents, windows, or the method ``exchange``) sends only the rows
    that a query sees. The bytes of a parcel (rows for one rank) are spread over the rounds until
    the one that needs it. ``gradients`` selects the backward pass.
    """
    flow = plan.flow(moves)
    entries: list[list[tuple[int, int, float, float]]] = [[] for _ in range(flow.rounds + 1)]
    for rank in range(plan.size):
        for parcel, size, under_way in parcels(flow, rank, sizes, moves, gradients=gradients):
            num_rounds = len(under_way)
            for index in under_way:
                entries[index].append((rank, parcel.peer, size / num_rounds, 1 / num_rounds))

    sent = []
    for entry in entries:
        columns = np.array(entry, dtype=np.float64).reshape(-1, 4).T
        ranks, peers, num_bytes, counts = columns  # [n] each
        sent.append(Sent(ranks.astype(np.int64), peers.astype(np.int64), num_bytes, counts))
    return sent


def needed_of_all(
    plan: Plan, sizes: Sizes, moves: Moves | None, ranks_per_node: int
) -> tuple[int, int]:
    """Return the bytes of needed rows that all ranks send within nodes and between nodes.

    ``moves`` is None for the forward pass.
    """
    flow = plan.flow(moves or "kv")
    inside = 0
    between = 0
    for rank in range(plan.size):
        sent = needed_traffic(flow, rank, sizes, moves)
        to_other_nodes = sent.between_nodes(rank, ranks_per_node)
        inside += sent.total - to_other_nodes
        between += to_other_nodes
    return inside, between
