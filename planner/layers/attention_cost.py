"""Predict the time of one layer's attention on a cluster, without running it.

Ranks run in lockstep: a round takes the longer of two times, the slowest rank's computing and the
busiest link's transfers, plus the part of the shorter that ``posted_overlap`` does not hide.
Collectives, and transfers after the last round, overlap only with the computing of ranks that share
a processor (``shared_overlap``). Nodes are filled in rank order, each context-parallel rank
together with its tensor-parallel neighbours.

So the time of a softmax attention is

    sum over rounds of (computing + transfers)
      - posted_overlap * sum over rounds of min(computing, transfers)
      + collectives

with the computing of the slowest rank and the transfers of the busiest link in each round. Linear
attention has no rounds of tiles: it scans its tokens, and passes or gathers states.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parallel.context.plan import Plan
from parallel.context.traffic import (
    Message,
    Moves,
    Sizes,
    bytes_of_all,
    collectives,
    messages,
)
from planner.cluster import MICRO, Cluster
from planner.layers.transfers import (
    Sent,
    collective_messages,
    needed_of_all,
    slots,
    transfer_seconds,
)

FORWARD = 4
"""FLOPs per (query, key) pair and channel in a forward pass: 2 matmuls (Dao 2023)."""
BACKWARD = 10
"""FLOPs per (query, key) pair and channel in a backward pass: 5 matmuls."""
SCAN = 4
"""FLOPs per token and state element to write and read a state; a backward pass has 3 scans."""
STATE = 2
"""FLOPs per token and state element to only write a state."""


@dataclass(frozen=True)
class Links:
    """Bytes that a context-parallel group sends in one layer's attention, forward and backward."""

    inside: int
    """Bytes within nodes."""
    between: int
    """Bytes between nodes."""


@dataclass(frozen=True)
class AttentionCost:
    """Cost of one layer's attention over all context-parallel ranks."""

    plan: Plan
    sizes: Sizes
    """Heads, tokens and bytes of one rank."""
    cluster: Cluster
    tp: int = 1
    """Number of tensor-parallel ranks; each belongs to its own context-parallel group."""

    def forward(self) -> float:
        """Return the seconds of the forward pass."""
        return self._seconds(None, FORWARD, SCAN)

    def backward(self) -> float:
        """Return the seconds of the backward pass, without a recomputed forward pass."""
        return self._seconds(self.plan.backward_moves(self.sizes), BACKWARD, 3 * SCAN)

    def computing(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds that each place computes, forward and backward: float64 ``[places]``.

        Only for softmax attention. A place is a group of ranks that share heads
        (``Geometry.place``); a rank waits for the slowest place and for transfers besides.
        """
        backward_moves = self.plan.backward_moves(self.sizes)
        forward = self._busy(None, FORWARD).sum(axis=0)
        return forward, self._busy(backward_moves, BACKWARD).sum(axis=0)

    def links(self) -> Links:
        """Return the bytes on each kind of link, forward and backward, counted from the plan."""
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
        """Return the seconds of a forward pass (``moves`` is None) or of a backward pass.

        Rounds of softmax attention overlap with the transfers of other rounds; ranks wait for
        collectives. With a method that sends only the needed rows, ranks do not run in lockstep,
        and the busiest rank or link decides. ``scan`` counts the operations of linear attention.
        """
        plan = self.plan
        if plan.geometry.method.states:
            return self._state_seconds(scan, reverse=moves is not None)

        busy = self._busy(moves, operations)  # [rounds, positions]
        joint = collectives(plan.geometry, self.sizes, moves, holders_join=not plan.sparse)
        waited_seconds = sum(
            self._transfer(collective_messages(collective)) for collective in joint
        )
        if plan.geometry.method.needed_only:
            sent = slots(plan, self.sizes, moves or "kv", gradients=moves is not None)
            busiest = float(busy.sum(axis=0).max())
            return self._overlapped([(busiest, self._transfer(*sent))], waited_seconds)

        # Nothing is computed after the last round.
        computing = [*busy.max(axis=1).tolist(), 0.0]
        rounds = list(zip(computing, self._in_transit(moves), strict=True))
        return self._overlapped(rounds, waited_seconds)

    def _in_transit(self, moves: Moves | None) -> list[float]:
        """Return the seconds that transfers take in every round, and after the last round.

        All messages that are under way in a round share the links.
        """
        if self.plan.sparse:
            sent = slots(self.plan, self.sizes, moves or "kv", gradients=moves is not None)
            return [self._transfer(one_round) for one_round in sent]

        # A message is in transit from the round that posts it to the one before its use, and its
        # bytes are spread evenly over these rounds. An entry holds the id of the array of peers,
        # the bytes in this round, and these bytes as a fraction of the message.
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

        # All rounds of a ring have equal entries: compute the seconds of each distinct entry once.
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

    def _overlapped(self, rounds: Sequence[tuple[float, float]], waited_seconds: float) -> float:
        """Return the total seconds of rounds that overlap computing with transfers, and of waits.

        Args:
            rounds: seconds of computing and of transfers in each round.
            waited_seconds: seconds of transfers that do not overlap with the same rank's computing.
        """
        cluster = self.cluster
        total = waited_seconds + sum(busy + sent for busy, sent in rounds)
        overlap = cluster.posted_overlap * sum(min(busy, sent) for busy, sent in rounds)

        # Ranks that share a processor: while one waits for a transfer, another computes.
        exposed_seconds = waited_seconds + sum(sent for busy, sent in rounds if not busy)
        computing_alone = sum(busy for busy, _ in rounds) - overlap
        return total - overlap - cluster.shared_overlap * min(exposed_seconds, computing_alone)

    def _busy(self, moves: Moves | None, operations: int) -> np.ndarray:
        """Return the seconds that ranks compute in every round, float64 ``[rounds, positions]``.

        A position is a rank's index in the method's layout.
        """
        sizes = self.sizes
        cluster = self.cluster
        work = self.plan.work(moves or "kv", (cluster.block_queries, cluster.block_keys))

        # A kernel also computes part of the masked pairs inside its tiles: all of those in blocks
        # that the mask cuts, and a share of the others. Tiles with a mask may also be slower.
        masked_pairs = work.masked + work.rounded
        masked_pairs = masked_pairs + cluster.masked_share * (work.hidden - work.rounded)
        full_pairs = work.pairs - work.masked
        computed_pairs = full_pairs + masked_pairs * (1 + cluster.mask_overhead)
        flops_per_pair = operations * sizes.batch * sizes.heads * sizes.head_dim
        launches = work.tiles * sizes.stages
        computing = computed_pairs * flops_per_pair / cluster.attention_flops_per_s
        return computing + launches * cluster.launch_us * MICRO

    def _state_seconds(self, operations: int, *, reverse: bool) -> float:
        """Return linear attention's seconds: a chain of states, or gathers during the scan."""
        geometry = self.plan.geometry
        sizes = self.sizes
        state = sizes.head_dim**2
        elements = sizes.batch * sizes.tokens * sizes.heads * state
        rate = self.cluster.attention_flops_per_s
        scan = operations * elements / rate
        if geometry.method.states == "gather":
            # Each rank computes its local state first; the scan then overlaps with the gather.
            local_state = STATE * elements / rate
            gathers = 0.0
            for collective in collectives(geometry, sizes, None):
                gathers += self._transfer(collective_messages(collective))
            return local_state + max(scan, gathers)

        # States pass from rank to rank, and each rank waits for the one before it.
        chain_seconds = 0.0
        moves: Moves | None = "kv" if reverse else None
        for message in list(self._messages(moves))[-geometry.slots :]:
            for rank in range(geometry.size):
                sent = Sent(np.array([rank]), message.to[[rank]], sizes.state, 1)
                chain_seconds += self._transfer(sent)
        return scan + chain_seconds

    def _messages(self, moves: Moves | None) -> Iterator[Message]:
        return messages(
            self.plan.geometry,
            self.sizes,
            moves or "kv",
            gradients=moves is not None,
            boundaries=self.plan.boundaries,
        )

    def _transfer(self, *together: Sent) -> float:
        return transfer_seconds(together, self.plan.size, self.cluster, self.tp)
