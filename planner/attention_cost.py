"""Predicted time of one layer's attention on a cluster. Needs no process.

Ranks run in lockstep: a round of attention takes as long as its slowest rank computes or its
busiest link transfers, plus the part of the shorter that the cluster's ``posted_overlap`` leaves.
Collectives, and transfers after the last round, overlap with no computing except that of ranks
which share a processor (``shared_overlap``). A rank of cp and its neighbours of tp fill nodes in
order.

So the time of a softmax attention is

    sum over rounds of (computing + transfers)
      - posted_overlap * sum over rounds of min(computing, transfers)
      + collectives

with the computing of the slowest rank and the transfers of the busiest link in each round. Linear
attention has no rounds of tiles: it scans its tokens, and passes or gathers states.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallel.context.plan import Plan
from parallel.context.sparse.rows import length_of
from parallel.context.traffic import (
    Message,
    Moves,
    Sizes,
    bytes_of_all,
    collectives,
    messages,
    needed_traffic,
    parcels,
)
from planner.cluster import MICRO, Cluster

FORWARD = 4
"""FLOPs per (query, key) pair and channel in a forward: 2 matrix products (Dao 2023)."""
BACKWARD = 10
"""FLOPs per (query, key) pair and channel in a backward: 5 matrix products."""
SCAN = 4
"""FLOPs per token and element of a state, to write and read it; a backward has 3 scans."""
STATE = 2
"""FLOPs per token and element of a state, to write it only."""
CIRCULATING_BUFFERS = 1.75
"""Buffers of a circulating gradient, relative to one for each holder, from the third round on.

One is accumulated and one arrives, and what was sent before is freed while the next arrives. Fitted
to rehearsals.
"""


@dataclass(frozen=True)
class Links:
    """Bytes that all ranks of a cp group send in one layer's attention, forward and backward."""

    inside: int
    """Bytes within nodes."""
    between: int
    """Bytes between nodes."""


class Sent(NamedTuple):
    """Bytes and messages from each of ``ranks`` to its peer, both int64 ``[n]``.

    A message that is spread over several rounds counts as a fraction in each.
    """

    ranks: np.ndarray
    peers: np.ndarray
    size: float | np.ndarray
    messages: float | np.ndarray


@dataclass(frozen=True)
class AttentionCost:
    """Cost of one layer's attention over all ranks of cp."""

    plan: Plan
    sizes: Sizes
    """Heads, tokens and bytes of one rank."""
    cluster: Cluster
    tp: int = 1
    """Tensor-parallel ranks, each of which has a cp group of its own."""

    def forward(self) -> float:
        """Return the seconds of a forward."""
        return self._seconds(None, FORWARD, SCAN)

    def backward(self) -> float:
        """Return the seconds of a backward, without recomputing its forward."""
        return self._seconds(self.plan.backward_moves(self.sizes), BACKWARD, 3 * SCAN)

    def links(self) -> Links:
        """Return the bytes on each kind of link, forward and backward, as the plan counts them."""
        plan = self.plan
        per_node = max(1, self.cluster.gpus_per_node // self.tp)
        sends_needed_rows = plan.sparse and not plan.geometry.method.states
        inside = 0
        between = 0
        for moves in (None, plan.backward_moves(self.sizes)):
            if sends_needed_rows:
                sent = needed_of_all(plan, self.sizes, moves, per_node)
            else:
                sent = bytes_of_all(plan.geometry, self.sizes, moves, per_node, plan.boundaries)
            inside += sent[0]
            between += sent[1]
        return Links(inside, between)

    def _seconds(self, moves: Moves | None, operations: int, scan: int) -> float:
        """Time a backward that moves KV or queries, or (None) a forward.

        Rounds of softmax attention overlap with what is in transit meanwhile; collectives are
        waited for. With a method that keeps local KV in place, ranks need not keep step: the
        busiest rank or link decides. Linear attention takes the ``scan``'s operations.
        """
        plan = self.plan
        if plan.geometry.method.states:
            return self._state_seconds(scan, reverse=moves is not None)

        busy = self._busy(moves, operations)  # [rounds, positions]
        joint = collectives(plan.geometry, self.sizes, moves, holders_join=not plan.sparse)
        waited = sum(self._transfer(_joint(collective)) for collective in joint)
        if plan.geometry.method.needed_only:
            sent = slots(plan, self.sizes, moves or "kv", gradients=moves is not None)
            busiest = float(busy.sum(axis=0).max())
            return self._overlapped([(busiest, self._transfer(*sent))], waited)

        # Nothing is computed after the last round.
        computing = [*busy.max(axis=1).tolist(), 0.0]
        rounds = list(zip(computing, self._in_transit(moves), strict=True))
        return self._overlapped(rounds, waited)

    def _in_transit(self, moves: Moves | None) -> list[float]:
        """Return the seconds that transfers take in every round, and after the last.

        They are those of all messages under way in the round, which share the links.
        """
        if self.plan.sparse:
            sent = slots(self.plan, self.sizes, moves or "kv", gradients=moves is not None)
            return [self._transfer(one_round) for one_round in sent]

        # A message is in transit from the round that posts it to the one before its use, and spread
        # evenly over them: an entry has the id of its peers, its bytes, and its part of a message.
        num_slots = len(self.plan.geometry.rounds) + 1
        entries: list[list[tuple[int, float, float]]] = [[] for _ in range(num_slots)]
        peers_by_id = {}
        for message in self._messages(moves):
            peers = id(message.to)
            peers_by_id[peers] = message.to
            num_rounds = message.last + 1 - message.first
            size = message.size / num_rounds
            for index in range(message.first, message.last + 1):
                entries[index].append((peers, size, 1 / num_rounds))

        # All rounds of a ring have equal entries, so that their seconds are computed once.
        ranks = np.arange(self.plan.size)
        seconds: dict[tuple[tuple[int, float, float], ...], float] = {}
        in_transit = []
        for entry in map(tuple, entries):
            if entry not in seconds:
                sent = [
                    Sent(ranks, peers_by_id[peers], size, count) for peers, size, count in entry
                ]
                seconds[entry] = self._transfer(*sent)
            in_transit.append(seconds[entry])
        return in_transit

    def _overlapped(self, rounds: Sequence[tuple[float, float]], waited: float) -> float:
        """Return the seconds of overlapping computing and transfers, and of waiting.

        Args:
            rounds: seconds of computing and of transfers in each round.
            waited: seconds of transfers that are waited for.
        """
        cluster = self.cluster
        total = waited + sum(busy + sent for busy, sent in rounds)
        overlap = cluster.posted_overlap * sum(min(busy, sent) for busy, sent in rounds)

        # Ranks on one processor: while one waits for a transfer, another computes.
        exposed = waited + sum(sent for busy, sent in rounds if not busy)
        computing_alone = sum(busy for busy, _ in rounds) - overlap
        return total - overlap - cluster.shared_overlap * min(exposed, computing_alone)

    def _busy(self, moves: Moves | None, operations: int) -> np.ndarray:
        """Return the seconds that ranks compute in every round, float64 ``[rounds, positions]``.

        A position is a rank's place in the method's layout.
        """
        work = self.plan.work(moves or "kv")
        sizes = self.sizes
        cluster = self.cluster

        # A kernel computes part of the pairs that the mask hides inside its tiles.
        computed_pairs = work.pairs + cluster.masked_share * work.hidden
        flops_per_pair = operations * sizes.batch * sizes.heads * sizes.head_dim
        launches = work.tiles * sizes.stages
        return computed_pairs * flops_per_pair / self._rate + launches * cluster.launch_us * MICRO

    def _state_seconds(self, operations: int, *, reverse: bool) -> float:
        """Time linear attention: states wait for their neighbours', or gathers overlap the scan."""
        geometry = self.plan.geometry
        sizes = self.sizes
        state = sizes.head_dim**2
        elements = sizes.batch * sizes.tokens * sizes.heads * state
        scan = operations * elements / self._rate
        if geometry.method.states == "gather":
            # The local state comes first; then the scan runs while all states are gathered.
            local_state = STATE * elements / self._rate
            gathers = 0.0
            for collective in collectives(geometry, sizes, None):
                gathers += self._transfer(_joint(collective))
            return local_state + max(scan, gathers)

        # States pass from rank to rank: each waits for the one before.
        passed = 0.0
        moves: Moves | None = "kv" if reverse else None
        for message in list(self._messages(moves))[-geometry.slots :]:
            for rank in range(geometry.size):
                sent = Sent(np.array([rank]), message.to[[rank]], sizes.state, 1)
                passed += self._transfer(sent)
        return scan + passed

    def _messages(self, moves: Moves | None) -> Iterator[Message]:
        return messages(
            self.plan.geometry,
            self.sizes,
            moves or "kv",
            gradients=moves is not None,
            boundaries=self.plan.boundaries,
        )

    @property
    def _rate(self) -> float:
        """FLOP/s of the attention kernel."""
        return 1e12 * self.cluster.peak_tflops * self.cluster.attention_fraction

    def _transfer(self, *together: Sent) -> float:
        return transfer_seconds(together, self.plan.size, self.cluster, self.tp)


def transfer_seconds(together: Sequence[Sent], num_ranks: int, cluster: Cluster, tp: int) -> float:
    """Return the seconds until the busiest rank, or the busiest node's shared link, has sent all.

    Messages to the same peer share a link's rate, and their latencies add up. Links of all ranks
    work at the same time.

    Args:
        together: messages that are under way at the same time.
        num_ranks: size of the cp group.
        tp: groups like this one that share the links.
    """
    if not together:
        return 0.0
    # All messages as arrays [n], then summed by pair of rank and peer, [pairs].
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


def _joint(collective: Message) -> Sent:
    """Return an all-gather as messages around a ring, and an all-to-all as one to each peer."""
    members = collective.to  # the group of each rank, [ranks, members]
    num_ranks, num_members = members.shape
    ranks = np.arange(num_ranks)
    if collective.kind == "gather":
        # Every rank passes the parts of all others on to the next one.
        own_index = np.argmax(members == ranks[:, None], axis=1)
        following = members[ranks, (own_index + 1) % num_members]
        num_passed = num_members - 1
        return Sent(ranks, following, num_passed * collective.size, num_passed)
    return Sent(np.repeat(ranks, num_members), members.ravel(), collective.size, 1)


def slots(plan: Plan, sizes: Sizes, moves: Moves, *, gradients: bool) -> list[Sent]:
    """Return the messages under way in every round, and after the last; sparse exchanges only.

    Only the rows that a query sees travel: packed documents, windows, exchange. A parcel's bytes
    are spread over the rounds until the one that needs it. With ``gradients`` it is a backward.
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
        ranks, peers, size, count = columns  # [n] each
        sent.append(Sent(ranks.astype(np.int64), peers.astype(np.int64), size, count))
    return sent


def needed_of_all(
    plan: Plan, sizes: Sizes, moves: Moves | None, ranks_per_node: int
) -> tuple[int, int]:
    """Return the bytes of all ranks within nodes and between nodes; ``moves`` None is a forward."""
    flow = plan.flow(moves or "kv")
    inside = 0
    between = 0
    for rank in range(plan.size):
        sent = needed_traffic(flow, rank, sizes, moves)
        to_other_nodes = sent.between_nodes(rank, ranks_per_node)
        inside += sent.total - to_other_nodes
        between += to_other_nodes
    return inside, between


@lru_cache(maxsize=4096)
def backward_buffers(plan: Plan, sizes: Sizes, moves: Moves) -> int:
    """Count the bytes of a backward's buffers: outputs, circulating or gathered tensors, gradients.

    Of a circulating tensor one copy is in use and one in transit; of a gradient, from the third
    round on, also the one sent before. Gathered gradients exist as sums and as what is sent. In
    stages of heads all buffers are a stage's, with what it exchanges again (q, dout, out and lse,
    k and v), besides all results and the sums of KV.

    Args:
        moves: the tensors that circulate, ``kv`` or ``queries``; the others are stationary.
    """
    geometry = plan.geometry
    stationary: Moves = "queries" if moves == "kv" else "kv"

    # The operator's results: dq, dk and dv of all heads, in their own dtype.
    all_heads = sizes._replace(stages=1)
    gradients = all_heads.gradient("kv") + all_heads.gradient("queries")
    buffers = gradients * sizes.element_size // sizes.wide
    if sizes.stages > 1:
        stage = sizes.stage
        exchanged = stage.payload("queries") + stage.payload("kv") + stage.gradient("kv")
        return backward_buffers(plan, stage, moves) + exchanged + buffers

    # Ulysses: the gradient of the exchanged queries is in transit.
    if geometry.ulysses_degree > 1:
        buffers += sizes.gradient("queries") * sizes.element_size // sizes.wide
    if geometry.size == geometry.ulysses_degree:
        return buffers

    # An exchange of needed rows receives all of them at once.
    if geometry.method.needed_only:
        num_rows = _most_received_rows(plan, moves)
        received = num_rows * (sizes.gradient(moves) + sizes.payload(moves)) // sizes.tokens
        return buffers + received + sizes.gradient(stationary)

    # A ring or a team: tensors of all holders circulate or are gathered, and teammates share the
    # stationary ones.
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

    # Several payloads are gathered before they are used.
    if num_holders > 1:
        buffers += num_holders * sizes.payload(moves)
    if num_teammates > 1:
        buffers += num_teammates * sizes.payload(stationary)
    return buffers


def _most_received_rows(plan: Plan, moves: Moves) -> int:
    """Return the rows that the busiest rank receives, all at once."""
    flow = plan.flow(moves)
    rows_by_rank = []
    for position in range(flow.geometry.shape.size):
        rows = [length_of(flow.held(index, position)) for index in range(flow.rounds)]
        rows_by_rank.append(sum(rows))
    return max(rows_by_rank)
