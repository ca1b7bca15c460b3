"""Predict the time of one layer's attention on a cluster. Needs no process.

Ranks run in lockstep: a round of attention takes as long as its slowest rank computes or its
busiest link is busy, and what the cluster's ``posted_overlap`` leaves of the shorter. Beside
collectives, and what is sent after the last round, nothing is computed but by ranks that share a
processor (``shared_overlap``). A rank of cp and its neighbours of tp fill nodes in order.
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
from planner.cluster import Cluster

FORWARD, BACKWARD = 4, 10
"""Operations per (query, key) pair and channel: 2 matrix products forward, 5 backward (Dao 2023).
"""
SCAN, STATE = 4, 2
"""Operations per token and element of a state: write and read, and write alone. A backward has 3
scans.
"""
MICRO, GB = 1e-6, 1e9
STILL_SENT = 1.75
"""Buffers of a circulating gradient for each of the held one and the one that arrives, from the
third round on: what was sent before is let go of while the next arrives. Fitted to rehearsals."""


@dataclass(frozen=True)
class Links:
    """Bytes that all ranks of a cp group send in one layer's attention, forward and backward."""

    inside: int
    between: int


class Sent(NamedTuple):
    """Bytes and (possibly fractional) messages from each of ``ranks`` to its peer, both int64
    ``[n]``.
    """

    ranks: np.ndarray
    peers: np.ndarray
    size: float | np.ndarray
    messages: float | np.ndarray


@dataclass(frozen=True)
class AttentionCost:
    """Cost of one layer's attention over all ranks of cp."""

    plan: Plan
    of: Sizes
    cluster: Cluster
    tp: int = 1

    def forward(self) -> float:
        """Return the seconds of a forward."""
        return self._seconds(None, FORWARD, SCAN)

    def backward(self) -> float:
        """Return the seconds of a backward, without recomputing its forward."""
        return self._seconds(self.plan.backward_moves(self.of), BACKWARD, 3 * SCAN)

    def links(self) -> Links:
        """Return the bytes on each kind of link, forward and backward, as the plan counts them."""
        moves = self.plan.backward_moves(self.of)
        plan, per_node = self.plan, max(1, self.cluster.gpus_per_node // self.tp)
        if plan.sparse and not plan.geometry.method.states:
            ways = [needed_of_all(plan, self.of, way, per_node) for way in (None, moves)]
        else:
            ways = [
                bytes_of_all(plan.geometry, self.of, way, per_node, plan.boundaries)
                for way in (None, moves)
            ]
        return Links(*map(sum, zip(*ways, strict=True)))

    def _seconds(self, moves: Moves | None, operations: int, scan: int) -> float:
        """Time a backward that moves KV or queries, or (None) a forward: linear attention by the
        ``scan``'s operations.

        The rounds of a softmax attention are timed beside what is in transit meanwhile, and its
        collectives. Ranks of a method that keeps own KV in place need not keep step: the busiest
        rank or link decides.
        """
        if self.plan.geometry.method.states:
            return self._state_seconds(scan, reverse=moves is not None)
        plan, busy = self.plan, self._busy(moves, operations)
        joint = collectives(plan.geometry, self.of, moves, holders_join=not plan.sparse)
        waited = sum(self._transfer(_joint(collective)) for collective in joint)
        if plan.geometry.method.needed_only:
            sent = slots(plan, self.of, moves or "kv", gradients=moves is not None)
            return self._overlapped(
                [(float(busy.sum(axis=0).max()), self._transfer(*sent))], waited
            )
        computing = [*busy.max(axis=1).tolist(), 0.0]
        return self._overlapped([*zip(computing, self._in_transit(moves), strict=True)], waited)

    def _in_transit(self, moves: Moves | None) -> list[float]:
        """Return the seconds that transfers take in every round, and after the last."""
        if self.plan.sparse:
            return list(
                map(
                    self._transfer,
                    slots(self.plan, self.of, moves or "kv", gradients=moves is not None),
                )
            )
        found: list[list[tuple[int, float, float]]] = [
            [] for _ in range(len(self.plan.geometry.rounds) + 1)
        ]
        targets = {}
        for message in self._messages(moves):
            targets[id(message.to)] = message.to
            under_way = range(message.first, message.last + 1)
            for index in under_way:
                found[index].append(
                    (id(message.to), message.size / len(under_way), 1 / len(under_way))
                )
        ranks = np.arange(self.plan.size)
        seconds = {
            slot: self._transfer(*(Sent(ranks, targets[to], *rest) for to, *rest in slot))
            for slot in set(map(tuple, found))  # a ring's rounds are all alike
        }
        return [seconds[tuple(slot)] for slot in found]

    def _overlapped(self, rounds: Sequence[tuple[float, float]], waited: float) -> float:
        """Return the seconds of rounds, each of computing and transfers beside it, and of those
        that are waited for.
        """
        together = self.cluster.posted_overlap * sum(map(min, rounds))
        alone = waited + sum(sent for busy, sent in rounds if not busy)
        left = sum(busy for busy, _ in rounds) - together  # of the computing, beside nothing yet
        return (
            waited
            + sum(map(sum, rounds))
            - together
            - self.cluster.shared_overlap * min(alone, left)
        )

    def _busy(self, moves: Moves | None, operations: int) -> np.ndarray:
        """Return the seconds that every place computes in every round, float64 ``[rounds,
        places]``.
        """
        work, of = self.plan.work(moves or "kv"), self.of
        per_pair = operations * of.batch * of.heads * of.head_dim
        launches = work.tiles * of.stages
        computed = work.pairs + self.cluster.masked_share * work.hidden
        return computed * per_pair / self._rate + launches * self.cluster.launch_us * MICRO

    def _state_seconds(self, operations: int, *, reverse: bool) -> float:
        """Time linear attention: passed between neighbours, states wait in turn; gathers overlap
        the scan.
        """
        geometry, of = self.plan.geometry, self.of
        elements = of.batch * of.tokens * of.heads * of.head_dim**2
        scan = operations * elements / self._rate
        if geometry.method.states == "gather":
            gathers = sum(
                self._transfer(_joint(collective)) for collective in collectives(geometry, of, None)
            )
            return STATE * elements / self._rate + max(scan, gathers)
        onward = list(self._messages("kv" if reverse else None))[-geometry.slots :]
        return scan + sum(
            self._transfer(Sent(np.array([rank]), message.to[[rank]], of.state, 1))
            for message in onward
            for rank in range(geometry.size)
        )

    def _messages(self, moves: Moves | None) -> Iterator[Message]:
        gradients, boundaries = moves is not None, self.plan.boundaries
        return messages(
            self.plan.geometry, self.of, moves or "kv", gradients=gradients, boundaries=boundaries
        )

    @property
    def _rate(self) -> float:
        return 1e12 * self.cluster.peak_tflops * self.cluster.attention_fraction

    def _transfer(self, *together: Sent) -> float:
        return transfer_seconds(together, self.plan.size, self.cluster, self.tp)


def transfer_seconds(together: Sequence[Sent], ranks: int, cluster: Cluster, tp: int) -> float:
    """Return the seconds until the busiest of ``ranks``, or the busiest node's shared link, has
    sent everything.
    """
    if not together:
        return 0.0
    shared, per_node = cluster.between_link == "node", max(1, cluster.gpus_per_node // tp)
    rank, peer = (
        np.concatenate([getattr(sent, side) for sent in together]) for side in ("ranks", "peers")
    )
    pair, which = np.unique(rank * ranks + peer, return_inverse=True)
    size, count = (
        np.bincount(
            which,
            np.concatenate(
                [np.broadcast_to(getattr(sent, what), len(sent.ranks)) for sent in together]
            ),
        )
        for what in ("size", "messages")
    )
    rank, peer = np.divmod(pair, ranks)
    node, beyond = rank // per_node, peer // per_node
    inside, outside = (rank != peer) & (node == beyond), node != beyond
    link, groups = (node, tp) if shared else (rank, 1)
    latency = np.where(inside, cluster.inside_latency_us, cluster.between_latency_us) * MICRO
    return max(
        np.bincount(rank[inside], size[inside] / (cluster.inside_gb_per_s * GB)).max(initial=0.0),
        np.bincount(link[outside], size[outside] * groups / (cluster.between_gb_per_s * GB)).max(
            initial=0.0
        ),
    ) + (count * latency)[rank != peer].max(initial=0.0)


def _joint(collective: Message) -> Sent:
    """Send an all-gather around a ring, as libraries do, and an all-to-all straight to each peer."""
    size, members = collective.to.shape
    rank = np.arange(size)
    if collective.kind == "gather":
        own = np.argmax(collective.to == rank[:, None], axis=1)
        following = collective.to[rank, (own + 1) % members]
        return Sent(rank, following, (members - 1) * collective.size, members - 1)
    return Sent(np.repeat(rank, members), collective.to.ravel(), collective.size, 1)


def slots(plan: Plan, of: Sizes, moves: Moves, *, gradients: bool) -> list[Sent]:
    """Return the messages under way in every round of a forward or (``gradients``) a backward, and
    after the last.

    Only the rows that a query sees travel: packed documents, windows, exchange. A parcel's bytes
    are spread over the rounds until the one that needs it.
    """
    flow = plan.flow(moves)
    entries: list[list[tuple[int, int, float, float]]] = [[] for _ in range(flow.rounds + 1)]
    for rank in range(plan.size):
        for parcel, size, under_way in parcels(flow, rank, of, moves, gradients=gradients):
            part = len(under_way)
            for index in under_way:
                entries[index].append((rank, parcel.peer, size / part, 1 / part))
    columns = (np.array(found, dtype=np.float64).reshape(-1, 4).T for found in entries)
    return [
        Sent(ranks.astype(np.int64), peers.astype(np.int64), *rest)
        for ranks, peers, *rest in columns
    ]


def needed_of_all(
    plan: Plan, of: Sizes, moves: Moves | None, ranks_per_node: int
) -> tuple[int, int]:
    """Return the bytes of all ranks (within nodes, between nodes), in a backward, or (None) in a
    forward.
    """
    flow, inside, between = plan.flow(moves or "kv"), 0, 0
    for rank in range(plan.size):
        sent = needed_traffic(flow, rank, of, moves)
        beyond = sent.between_nodes(rank, ranks_per_node)
        inside, between = inside + sent.total - beyond, between + beyond
    return inside, between


@lru_cache(maxsize=4096)
def backward_buffers(plan: Plan, of: Sizes, moves: Moves) -> int:
    """Count the bytes of a backward's buffers: a kernel's outputs, circulating or gathered tensors,
    their gradients.

    Of what circulates one is held and one in transit; of gradients, from the third round on, also
    what was sent before. Gathered, they are there as sums and as what is sent. In stages of heads
    they are a stage's, with what it exchanges again: q, dout, out and lse, k and v; and all
    results, and sums of KV.
    """
    stays: Moves = "queries" if moves == "kv" else "kv"
    whole, geometry = of._replace(stages=1), plan.geometry
    buffers = (
        (whole.gradient("kv") + whole.gradient("queries")) * of.element_size // of.wide
    )  # dq, dk and dv
    if of.stages > 1:
        stage = of.stage
        exchanged = stage.payload("queries") + stage.payload("kv") + stage.gradient("kv")
        return backward_buffers(plan, stage, moves) + exchanged + buffers
    if geometry.ulysses_degree > 1:
        buffers += of.gradient("queries") * of.element_size // of.wide  # under way
    if geometry.size == geometry.ulysses_degree:
        return buffers
    if geometry.method.needed_only:  # all rows are received at once
        flow = plan.flow(moves)
        places = range(flow.geometry.shape.size)
        rows = max(
            sum(length_of(flow.held(index, place)) for index in range(flow.rounds))
            for place in places
        )
        return (
            buffers
            + rows * (of.gradient(moves) + of.payload(moves)) // of.tokens
            + of.gradient(stays)
        )
    held, team, rounds = (
        len(geometry.holders(0)),
        len(geometry.teammates(0)),
        len(geometry.rounds_of(0)),
    )
    if rounds > 1:
        held = 2 * len(geometry.rounds_of(0)[-1].holds) // geometry.ulysses_degree
    gathered = rounds == 1 and held > 1
    buffers += int((2 if gathered else STILL_SENT if rounds > 2 else 1) * held * of.gradient(moves))
    buffers += team * (1 if team == 1 else 2) * of.gradient(stays)
    return (
        buffers
        + (held * of.payload(moves) if held > 1 else 0)
        + (team * of.payload(stays) if team > 1 else 0)
    )
