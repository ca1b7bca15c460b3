"""Predict the time of one layer's gated delta rule over all ranks of cp, with the convolution
before it.

Ranks compute their tokens at once and pass states along each cut document in rounds, as
parallel/context/linear does. A document that one rank holds sends nothing, whatever its layout.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kernels.delta.chunks import CHUNK
from kernels.delta.rule import GPU_CHUNKS
from parallel.context.linear import segments as schedules
from parallel.context.linear.halo import halo_traffic
from parallel.context.linear.segments import parts
from parallel.context.plan import Plan
from planner.attention_cost import GB, MICRO, Sent, transfer_seconds
from planner.cluster import Cluster

BACKWARD = 2.5
"""Products of a backward for each of a forward, which it partly computes again."""
PER_CHANNEL = 1.6
"""Time with a gate per channel for each with one per head; measured on a CPU alone."""
PASSES = 10.0
"""Times that a forward reads or writes the channels of q, k, v and the output gate: their
concatenation, convolution, activation, norms and gate. Counted by operators; a backward does
twice."""


class DeltaShape(NamedTuple):
    """Heads of a layer with a gated delta rule."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    per_channel: bool = False
    slab: int = GPU_CHUNKS
    """Chunks of all heads that kernels take at once."""

    def split(self, tp: int) -> "DeltaShape":
        """Return the heads of one of ``tp`` ranks."""
        return self._replace(key_heads=self.key_heads // tp, heads=self.heads // tp)

    @property
    def channels(self) -> int:
        """Return the channels of q, k and v, which the convolution takes."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def outputs(self) -> int:
        """Return the channels of the output."""
        return self.heads * self.value_dim

    @property
    def state(self) -> int:
        """Return the elements of the states of all heads."""
        return self.heads * self.key_dim * self.value_dim

    def results(self, plan: Plan, batch: int, element_size: int) -> list[float]:
        """Return the bytes per token of the operator's outputs: states, Q and the output.

        States are those before each slab of chunks, and the last. Q is what a state that comes
        later adds to the outputs of tokens that do not wait for it.
        """
        step = CHUNK * max(1, self.slab // (batch * self.heads))
        states = (
            4 * (1 + -(-plan.local_len // step)) * batch * self.state / (batch * plan.local_len)
        )
        return [
            states,
            4 * wide_share(plan) * self.heads * self.key_dim,
            element_size * self.outputs,
        ]

    def activations(self, plan: Plan, batch: int, element_size: int, normed: float) -> float:
        """Return the bytes per token that the rule and the modules around it keep for a backward.

        q, k and v before and after the convolution and the activation, queries and keys normalised,
        in float32 and in their dtype; the output before and after its norm, which keeps ``normed``
        copies, its gate, and both together; gates; states and Q.
        """
        states, reads, *_ = self.results(plan, batch, element_size)
        both = 2 * self.key_heads * self.key_dim
        gates = 4 * self.heads * (3 + 4 * (self.key_dim if self.per_channel else 1))
        channels = 3 * self.channels + both + (4 + normed) * self.outputs
        return states + reads + element_size * channels + 4 * both * (element_size < 4) + gates

    def buffers(self, batch: int, tokens: int, element_size: int) -> float:
        """Return bytes of a backward: gradients of q, k and v as its kernels give them and in their
        dtype; room.
        """
        gradients = batch * tokens * self.channels * (max(4, element_size) + element_size)
        return gradients + self.workspace(batch, tokens)

    def workspace(self, batch: int, tokens: int) -> int:
        """Return the bytes that kernels take to work in: of a slab's chunks, in float32."""
        d, e = self.key_dim, self.value_dim
        inside = CHUNK * (3 * CHUNK + d + 2 * e) + 2 * d * e
        return (
            4
            * min(max(self.slab, batch * self.heads), batch * self.heads * -(-tokens // CHUNK))
            * inside
        )


def wide_share(plan: Plan) -> float:
    """Return the largest share of a rank's positions that is computed before its state arrives."""
    each = (parts(plan, rank).eager for rank in range(plan.size))
    return (
        max(sum(segment.length for part in wide for segment in part.segments) for wide in each)
        / plan.local_len
    )


@dataclass(frozen=True)
class DeltaCost:
    """Cost of one layer's convolution and delta rule over all ranks of cp."""

    plan: Plan
    of: DeltaShape
    """Heads of one rank."""
    batch: int
    element_size: int
    cluster: Cluster
    tp: int = 1
    schedule: schedules.Schedule | None = None
    """As of ``--delta-rule-schedule``, by default the plan's."""

    def forward(self) -> float:
        """Return the seconds of a forward."""
        return self._seconds(reverse=False)

    def backward(self) -> float:
        """Return the seconds of a backward, without recomputing its forward."""
        return self._seconds(reverse=True)

    def rounds(self, *, reverse: bool) -> list[list[tuple[int, int, int]]]:
        """Return (rank, peer, bytes) of the halos, then of the states of each round; gradients go
        back.
        """
        of, wide = self.of, max(4, self.element_size)
        row = self.batch * of.channels * (wide if reverse else self.element_size)
        halo = (
            halo_traffic(self.plan, rank, of.taps, row, gradient=reverse).p2p
            for rank in range(self.plan.size)
        )
        found = [[(rank, *one) for rank, sent in enumerate(halo) for one in sent.items()]]
        state, square = (
            self.batch * of.heads * of.key_dim * width * wide
            for width in (of.value_dim, of.key_dim)
        )
        for messages in schedules.rounds(self.plan, gradient=reverse, schedule=self.schedule):
            sent = (
                (one.source.rank, one.peer, state + square * (not one.state)) for one in messages
            )
            found.append([one for one in sent if one[0] != one[1]])
        return found

    def _seconds(self, *, reverse: bool) -> float:
        sent = 0.0
        for ranks, peers, size in (np.array(one).T for one in self.rounds(reverse=reverse) if one):
            together = [Sent(ranks, peers, size.astype(np.float64), 1)]
            sent += float(transfer_seconds(together, self.plan.size, self.cluster, self.tp))
        return float(self._busy(reverse=reverse) + sent + self._composing(reverse=reverse))

    def _composing(self, *, reverse: bool) -> float:
        """Return the seconds in which the busiest rank of each round joins the maps that come: M S
        + U or M [U | M].
        """
        of, seconds = self.of, 0.0
        for messages in schedules.rounds(self.plan, gradient=reverse, schedule=self.schedule):
            work = Counter[int]()
            for one in messages:
                columns = of.value_dim + of.key_dim * (not one.state)
                work[one.peer] += self.batch * of.heads * of.key_dim**2 * columns
            joined = max(Counter(one.peer for one in messages).values(), default=0)
            seconds += (
                2 * max(work.values(), default=0) / self._rate
                + joined * self.cluster.launch_us * MICRO
            )
        return seconds

    @property
    def _rate(self) -> float:
        return 1e12 * self.cluster.peak_tflops * self.cluster.delta_share

    def _busy(self, *, reverse: bool) -> float:
        """Return the seconds that the busiest rank computes: all products, and channels that pass
        through memory.
        """
        of, cluster, found = self.of, self.cluster, 0.0
        d, e = of.key_dim, of.value_dim
        each = 3 * d * e + CHUNK * (3 * d + 2 * e)  # multiply-adds of a token and head
        wider = (
            d * e if reverse else 3 * d * d + CHUNK * d + d * e
        )  # one whose state comes later: Q, M and Q S
        for rank in range(self.plan.size):
            mine = parts(self.plan, rank)
            tokens = sum(segment.length for part in mine.all for segment in part.segments)
            wide = sum(segment.length for part in mine.eager for segment in part.segments)
            found = max(found, (BACKWARD if reverse else 1) * each * tokens + wider * wide)
        slower = PER_CHANNEL if of.per_channel else 1.0
        seconds = (
            slower * 2 * self.batch * of.heads * found / self._rate + cluster.launch_us * MICRO
        )
        if cluster.memory_gb_per_s:
            passed = (1 + reverse) * PASSES * (of.channels + of.outputs) * self.element_size
            seconds += passed * self.batch * self.plan.local_len / (cluster.memory_gb_per_s * GB)
        return seconds


def fastest_schedule(cost: DeltaCost) -> schedules.Schedule:
    """Return the schedule of fewest seconds, forward and backward; of equals the chain."""

    def seconds(name: schedules.Schedule) -> float:
        one = replace(cost, schedule=name)
        return one.forward() + one.backward()

    return min(schedules.SCHEDULES, key=seconds)
