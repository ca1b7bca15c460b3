"""Predict the time and memory of a layer's gated delta rule and the convolution before it.

Ranks compute their tokens in parallel and pass states along each document that several ranks share,
in the rounds of parallel/context/linear. A document on a single rank sends nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kernels.delta.chunks import CHUNK
from kernels.delta.rule import GPU_CHUNKS
from parallel.context.linear import segments as schedules
from parallel.context.linear.halo import halo_traffic
from parallel.context.linear.segments import parts
from parallel.context.plan import Plan
from planner.cluster import MICRO, Cluster
from planner.layers.attention_cost import Sent, transfer_seconds

BACKWARD = 2.5
"""FLOPs of a backward pass relative to a forward pass; it recomputes part of the forward pass."""
PER_CHANNEL = 1.6
"""Time with one gate per channel relative to one gate per head; measured only on a CPU."""
PASSES = 10.0
"""Number of times that a forward pass reads or writes the channels of q, k, v and the output gate.

Counted by operator, in the concatenation, convolution, activation, norms and gate; a backward pass
has twice as many.
"""


class DeltaShape(NamedTuple):
    """Sizes of a layer with a gated delta rule."""

    key_heads: int
    """Number of query and key heads; several value heads may share each."""
    heads: int
    """Number of value heads; each has one state [key_dim, value_dim]."""
    key_dim: int
    value_dim: int
    taps: int
    """Number of tokens in the convolution's window."""
    per_channel: bool = False
    """True if the gate has one value per key channel, False if it has one per head."""
    slab: int = GPU_CHUNKS
    """Number of chunks, counted over all heads, that the kernels process at once (a slab)."""

    def split(self, tp: int) -> "DeltaShape":
        """Return the sizes of one of ``tp`` tensor-parallel ranks."""
        return self._replace(key_heads=self.key_heads // tp, heads=self.heads // tp)

    @property
    def channels(self) -> int:
        """Return the total number of channels of q, k and v, the convolution's input."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def outputs(self) -> int:
        """Return the number of output channels."""
        return self.heads * self.value_dim

    @property
    def state(self) -> int:
        """Return the number of elements of all heads' states."""
        return self.heads * self.key_dim * self.value_dim

    def results(
        self, plan: Plan, batch: int, element_size: int, length: int | None = None
    ) -> list[float]:
        """Return the bytes per token of the operator's outputs: states, Q and the output.

        The states are those before each slab of chunks, and the final one. Tokens do not wait for
        the state of an earlier rank: Q times that state is added to their outputs when it arrives.

        Args:
            length: number of a rank's tokens of one sequence in a slice. By default the operator
                takes all tokens at once. A slice's ranks split the heads, so none waits.
        """
        slab_tokens = CHUNK * max(1, self.slab // (batch * self.heads))
        num_states = 1 + -(-(length or plan.local_len) // slab_tokens)
        states = 4 * num_states * self.state / (length or plan.local_len)
        q = 0.0
        if length is None:
            q = 4 * wide_share(plan) * self.heads * self.key_dim
        return [states, q, element_size * self.outputs]

    def activations(
        self,
        plan: Plan,
        batch: int,
        element_size: int,
        normed: float,
        length: int | None = None,
    ) -> float:
        """Return the bytes per token kept for the backward pass by the rule and its modules.

        These are q, k and v before and after the convolution and the activation; normalised queries
        and keys in float32 and in their dtype; the output before and after its norm (which keeps
        ``normed`` copies), the output gate and the gated output; gates; states and Q. ``length`` is
        that of ``results``.
        """
        states, q, _ = self.results(plan, batch, element_size, length)
        queries_and_keys = 2 * self.key_heads * self.key_dim
        gate_width = self.key_dim if self.per_channel else 1
        gates = 4 * self.heads * (3 + 4 * gate_width)
        channels = 3 * self.channels + queries_and_keys + (4 + normed) * self.outputs
        in_float32 = 4 * queries_and_keys * (element_size < 4)
        return states + q + element_size * channels + in_float32 + gates

    def buffers(self, batch: int, tokens: int, element_size: int) -> float:
        """Return the bytes of a backward pass: gradients of q, k and v, and the kernels' workspace.

        The gradients exist in float32 and in the layer's dtype.
        """
        gradients = batch * tokens * self.channels * (max(4, element_size) + element_size)
        return gradients + self.workspace(batch, tokens)

    def workspace(self, batch: int, tokens: int) -> int:
        """Return the bytes of the kernels' workspace: the chunks of one slab, in float32."""
        key_dim = self.key_dim
        value_dim = self.value_dim
        chunk_elements = CHUNK * (3 * CHUNK + key_dim + 2 * value_dim) + 2 * key_dim * value_dim
        sequences = batch * self.heads
        num_chunks = min(max(self.slab, sequences), sequences * -(-tokens // CHUNK))
        return 4 * num_chunks * chunk_elements


def wide_share(plan: Plan) -> float:
    """Return the share of a rank's tokens that are computed before their state arrives.

    This is the share on the rank on which it is largest. Such tokens need additional matmuls and
    keep Q, so they are called wide.
    """
    most_tokens = max(_num_tokens(parts(plan, rank).eager) for rank in range(plan.size))
    return most_tokens / plan.local_len


def _num_tokens(groups: Iterable[Any]) -> int:
    """Count the tokens of a rank's parts of documents."""
    return sum(segment.length for part in groups for segment in part.segments)


@dataclass(frozen=True)
class DeltaCost:
    """Cost of one layer's convolution and delta rule over all context-parallel ranks."""

    plan: Plan
    shape: DeltaShape
    """Sizes of one rank's part of the layer."""
    batch: int
    element_size: int
    cluster: Cluster
    tp: int = 1
    schedule: schedules.Schedule | None = None
    """Value of ``--delta-rule-schedule``, by default the plan's."""

    def forward(self) -> float:
        """Return the seconds of the forward pass."""
        return self._seconds(reverse=False)

    def backward(self) -> float:
        """Return the seconds of the backward pass, without a recomputed forward pass."""
        return self._seconds(reverse=True)

    def rounds(self, *, reverse: bool) -> list[list[tuple[int, int, int]]]:
        """Return (rank, peer, bytes) of each message: first the halos, then each round's states.

        Halos are the earlier tokens that the convolution needs. With ``reverse`` the messages carry
        the gradients of halos and states.
        """
        shape = self.shape
        gradient_size = max(4, self.element_size)
        row_size = gradient_size if reverse else self.element_size
        row = self.batch * shape.channels * row_size
        halos = []
        for rank in range(self.plan.size):
            sent = halo_traffic(self.plan, rank, shape.taps, row, gradient=reverse).p2p
            halos += [(rank, peer, num_bytes) for peer, num_bytes in sent.items()]

        # A message is a map of states, S -> M S + U, or only U if it starts at a document's start.
        state = self.batch * shape.heads * shape.key_dim * shape.value_dim * gradient_size
        square = self.batch * shape.heads * shape.key_dim * shape.key_dim * gradient_size
        rounds = [halos]
        for messages in self._messages(reverse=reverse):
            sent_states = []
            for message in messages:
                rank = message.source.rank
                if rank != message.peer:
                    num_bytes = state
                    if not message.state:
                        num_bytes += square
                    sent_states.append((rank, message.peer, num_bytes))
            rounds.append(sent_states)
        return rounds

    def _messages(self, *, reverse: bool) -> Iterable[Sequence[Any]]:
        """Return the state messages of each round."""
        return schedules.rounds(self.plan, gradient=reverse, schedule=self.schedule)

    def _seconds(self, *, reverse: bool) -> float:
        sent_seconds = 0.0
        for messages in self.rounds(reverse=reverse):
            if messages:
                ranks, peers, size = np.array(messages).T
                together = [Sent(ranks, peers, size.astype(np.float64), 1)]
                sent_seconds += float(
                    transfer_seconds(together, self.plan.size, self.cluster, self.tp)
                )
        busy = self._busy(reverse=reverse)
        return float(busy + sent_seconds + self._composing(reverse=reverse))

    def _composing(self, *, reverse: bool) -> float:
        """Return the busiest rank's seconds to compose arriving maps (M S + U, M [U | M])."""
        shape = self.shape
        cluster = self.cluster
        seconds = 0.0
        for messages in self._messages(reverse=reverse):
            # Per rank: multiply-adds of the products M S or M [U | M], and kernel launches.
            multiply_adds = Counter[int]()
            num_joined = Counter[int]()
            for message in messages:
                columns = shape.value_dim
                if not message.state:
                    columns += shape.key_dim
                elements = self.batch * shape.heads * shape.key_dim**2
                multiply_adds[message.peer] += elements * columns
                num_joined[message.peer] += 1

            products = 2 * max(multiply_adds.values(), default=0) / self._rate
            launches = max(num_joined.values(), default=0) * cluster.launch_us * MICRO
            seconds += products + launches
        return seconds

    @property
    def _rate(self) -> float:
        """FLOP/s of the delta rule's kernels."""
        return 1e12 * self.cluster.peak_tflops * self.cluster.delta_share

    def _busy(self, *, reverse: bool) -> float:
        """Return the busiest rank's seconds for matmuls, and for reading and writing channels."""
        shape = self.shape
        cluster = self.cluster

        # Multiply-adds per token and head; then the additional ones for Q, M and Q S of a token
        # whose state arrives later.
        d = shape.key_dim
        e = shape.value_dim
        per_token = 3 * d * e + CHUNK * (3 * d + 2 * e)
        per_wide_token = 3 * d * d + CHUNK * d + d * e
        passes = 1.0
        if reverse:
            per_wide_token = d * e
            passes = BACKWARD

        multiply_adds = 0.0
        for rank in range(self.plan.size):
            local = parts(self.plan, rank)
            of_rank = passes * per_token * _num_tokens(local.all) + per_wide_token * _num_tokens(
                local.eager
            )
            multiply_adds = max(multiply_adds, of_rank)

        # Matmuls run at the kernels' rate; reads and writes of the channels at the memory's.
        slowdown = 1.0
        if shape.per_channel:
            slowdown = PER_CHANNEL
        products = slowdown * 2 * self.batch * shape.heads * multiply_adds
        seconds = products / self._rate + cluster.launch_us * MICRO
        if cluster.memory_gb_per_s:
            channels = (1 + reverse) * PASSES * (shape.channels + shape.outputs)
            num_bytes = channels * self.element_size
            seconds += num_bytes * self.batch * self.plan.local_len / cluster.memory_bytes_per_s
        return seconds


def fastest_schedule(cost: DeltaCost) -> schedules.Schedule:
    """Return the schedule with the shortest forward plus backward time; ``chain`` wins a tie."""

    def seconds(name: schedules.Schedule) -> float:
        with_schedule = replace(cost, schedule=name)
        return with_schedule.forward() + with_schedule.backward()

    return min(schedules.SCHEDULES, key=seconds)
