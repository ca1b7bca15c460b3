"""Predicted seconds, bytes and memory of a step over mixed documents, for each way to share them.

One group of all ranks is predicted by the planner, micro-batch by micro-batch, with the plan of its
documents. Groups are predicted by the same rates: the matmuls and pointwise work of a rank's
tokens, the pairs of its documents, and a ring that passes keys and values on, round by round, while
a round's pairs are computed. The exchange of weights and gradients is that of all ranks either way.

Every attention kernel has a fixed time. A ring launches one kernel a round; an exchange launches as
many as ``kernels.cuda`` does, which packs small tiles into one launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from bench.documents.groups import Turn, Waves, run
from kernels.blocks import FULL
from kernels.cuda import SMALL
from parallel.context.plan import Plan, make_plan
from planner.cluster import MICRO, Cluster
from planner.layers.attention_cost import BACKWARD, FORWARD, AttentionCost
from planner.layers.memory import rank_sizes
from planner.step_cost import step_seconds
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape

ROOM = 0.9
"""Share of the memory that a step may take, as in the planner."""
CAPACITIES = (262144, 131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024)
"""Numbers of tokens on a rank to try, the largest first."""


class Sent(NamedTuple):
    """Bytes that a rank sends in a step's attention, as a mean over all ranks."""

    inside: float
    """Bytes to ranks of its node."""
    between: float
    """Bytes to other nodes."""


@dataclass(frozen=True)
class Outcome:
    """Prediction for a step of one way to share documents."""

    name: str
    capacity: int
    """Maximum number of tokens on a rank in a micro-batch."""
    seconds: float
    """Seconds of a step without the exchange of weights and gradients."""
    computing: float
    """Seconds that a rank computes, as a mean over all ranks; without a kernel's fixed time."""
    sent: Sent
    memory: float
    """Bytes at the peak of the busiest rank."""
    sizes: tuple[int, ...] = ()
    """Numbers of ranks of the groups."""

    @property
    def idle(self) -> float:
        """Share of the step in which the mean rank waits, for other ranks or for a link."""
        return 1 - self.computing / self.seconds


@dataclass(frozen=True)
class Machine:
    """Ranks of a cluster that train a model, and the seconds of what documents do not change."""

    work: StepShape
    """The model, with two micro-batches, so that gradients are summed over several."""
    arrangement: Arrangement
    """Settings that save memory; data parallelism is over all ranks."""
    cluster: Cluster
    """Rates; its ``launch_us`` is for a launch, not for a tile as in the planner."""
    ranks: int

    @cached_property
    def without_launches(self) -> Cluster:
        """The cluster for the planner, which would count a launch for each tile."""
        return replace(self.cluster, launch_us=0.0)

    def launch_seconds(self, launches: int) -> float:
        """Return the fixed seconds of a layer's kernels in all layers, forward and backward."""
        return 2 * self.work.layers * launches * self.cluster.launch_us * MICRO

    def divided(self, plan: Plan) -> Arrangement:
        """Return the arrangement if each group of ``plan.size`` ranks has its own documents."""
        return replace(self.arrangement, dp=self.ranks // plan.size)

    @cached_property
    def token_seconds(self) -> float:
        """Seconds per token on a rank, of all layers and the head, without attention."""
        seconds = self._reference
        return (seconds["linear"] + seconds["recompute"]) / CAPACITIES[-1]

    @cached_property
    def exchange_seconds(self) -> float:
        """Seconds of a step's exchange of weights and gradients that computing does not hide."""
        return self._reference["data parallel"]

    @cached_property
    def _reference(self) -> dict[str, float]:
        plan = ring_plan(CAPACITIES[-1], 1)
        work = replace(self.work, micro_batches=1)
        return step_seconds(work, plan, self.divided(plan), self.cluster)[0]

    def memory(self, plan: Plan) -> float:
        """Return the bytes at the peak of the busiest rank, if groups have this plan."""
        return sum(memory_of(self.work, plan, self.divided(plan)).values())

    def fits(self, plan: Plan) -> bool:
        """Return True if a step with this plan fits into the memory, with room to spare."""
        return self.memory(plan) <= ROOM * 1e9 * self.cluster.memory_gb

    @cached_property
    def group_capacity(self) -> int:
        """Maximum number of tokens on a rank of any group that fit into the memory."""
        for capacity in CAPACITIES:
            size = 1
            while size <= self.ranks and self.fits(ring_plan(capacity, size)):
                size *= 2
            if size > self.ranks:
                return capacity
        return 0

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.cluster.gpus_per_node


@lru_cache(maxsize=256)
def ring_plan(capacity: int, size: int) -> Plan:
    """Return the plan of a zigzag ring of ``size`` ranks, each with ``capacity`` tokens."""
    return make_plan("zigzag", seq_len=capacity * size, size=size)


@lru_cache(maxsize=64)
def _all_ranks_plan(machine: Machine, documents: tuple[int, ...]) -> Plan:
    return make_plan(
        "exchange",
        seq_len=documents[-1],
        size=machine.ranks,
        documents=documents,
        ranks_per_node=machine.cluster.gpus_per_node,
    )


def plans_of(machine: Machine, batches: Sequence[np.ndarray]) -> list[Plan]:
    """Return the plans of micro-batches of documents over all ranks: balanced, by exchange."""
    plans = []
    for lengths in batches:
        documents = (0, *np.cumsum(lengths).tolist())
        plans.append(_all_ranks_plan(machine, documents))
    return plans


def one_group(machine: Machine, plans: Sequence[Plan]) -> Outcome:
    """Predict a step in which all ranks share each micro-batch."""
    work = machine.work
    rate = machine.cluster.attention_flops_per_s
    seconds = 0.0
    computing = 0.0
    inside = 0
    between = 0
    pair_flops = (FORWARD + BACKWARD) * work.heads * work.head_dim
    for plan in plans:
        cost = AttentionCost(plan, rank_sizes(work, plan, 1), machine.without_launches)
        linear = plan.local_len * machine.token_seconds
        seconds += linear + work.layers * (cost.forward() + cost.backward())
        seconds += machine.launch_seconds(most_launches(plan))
        pairs = float(plan.work().pairs.sum()) / machine.ranks
        computing += linear + work.layers * pairs * pair_flops / rate
        links = cost.links()
        inside += links.inside
        between += links.between
    share = work.layers / machine.ranks
    return Outcome(
        name="one group",
        capacity=plans[0].local_len,
        seconds=seconds,
        computing=computing,
        sent=Sent(inside * share, between * share),
        memory=max(map(machine.memory, plans)),
        sizes=(machine.ranks,),
    )


def group_a_node(
    machine: Machine, name: str, batches: Sequence[np.ndarray], *, by_work: bool
) -> Outcome:
    """Predict a step in which the ranks of a node share each of its micro-batches.

    Nodes take the micro-batches in turn or, ``by_work``, the longest first, each to the node that
    is free first; a node does not wait for others before the step's end.
    """
    per_node = machine.cluster.gpus_per_node
    node = replace(machine, ranks=per_node)
    plans = plans_of(node, batches)
    parts = []
    for plan in plans:
        parts.append(one_group(node, [plan]))
    if by_work:
        parts.sort(key=lambda part: -part.seconds)

    ready = np.zeros(machine.ranks // per_node)
    computing = 0.0
    inside = 0.0
    for number, part in enumerate(parts):
        index = int(ready.argmin()) if by_work else number % len(ready)
        ready[index] += part.seconds
        computing += part.computing
        inside += part.sent.inside
    return Outcome(
        name=name,
        capacity=parts[0].capacity,
        seconds=float(ready.max()),
        computing=computing / len(ready),
        sent=Sent(inside / len(ready), 0.0),
        memory=max(map(machine.memory, plans)),
        sizes=(per_node,),
    )


def most_launches(plan: Plan) -> int:
    """Return the number of kernels that the busiest rank launches for one attention.

    Small tiles of a round share one launch for each of the two kinds; a larger tile has its own.
    """
    max_launches = 0
    for rank in range(plan.size):
        launches = 0
        for step in plan.schedule(rank):
            small_kinds = set()
            for tile in step.tiles:
                if tile.pairs <= SMALL:
                    small_kinds.add(tile.kind == FULL)
                else:
                    launches += 1
            launches += len(small_kinds)
        max_launches = max(max_launches, launches)
    return max_launches


def pairs_of(turn: Turn) -> float:
    """Return the number of (query, key) pairs of each rank of a turn; zigzag makes them equal."""
    lengths = np.array(turn.lengths, dtype=np.float64)
    return float((lengths * (lengths + 1)).sum()) / 2 / turn.size


def computing_seconds(machine: Machine, turn: Turn) -> tuple[float, float, float]:
    """Return a rank's seconds of a turn: without attention, and attention forward and backward."""
    work = machine.work
    rate = machine.cluster.attention_flops_per_s
    unit = work.layers * work.heads * work.head_dim * pairs_of(turn) / rate
    return turn.tokens * machine.token_seconds, FORWARD * unit, BACKWARD * unit


def row_bytes(work: StepShape) -> int:
    """Return the bytes of a token's keys and values in one layer."""
    return 2 * work.kv_heads * work.head_dim * work.element_size


def turn_seconds(machine: Machine, turn: Turn) -> float:
    """Predict the seconds of a turn: a ring of ``size`` rounds, computing hides what it sends.

    The backward pass sends keys and values and, as far again, their gradients, here in the dtype of
    the activations.
    """
    linear, forward, backward = computing_seconds(machine, turn)
    linear += machine.launch_seconds(turn.size)
    if turn.size == 1:
        return linear + forward + backward
    cluster = machine.cluster
    rate = cluster.inside_bytes_per_s
    latency = cluster.inside_latency_us * MICRO
    if machine.node_of(turn.first) != machine.node_of(turn.ranks[-1]):
        rate = cluster.between_bytes_per_s
        latency = cluster.between_latency_us * MICRO

    layers = machine.work.layers
    transfer = layers * (turn.tokens * row_bytes(machine.work) / rate + latency)
    hops = turn.size - 1
    seconds = linear
    for computing, sent in ((forward, transfer), (backward, 2 * transfer)):
        round_seconds = computing / turn.size
        seconds += round_seconds + hops * max(round_seconds, sent)
    return seconds


def grouped(machine: Machine, name: str, waves: Waves, capacity: int) -> Outcome:
    """Predict a step in which groups take turns."""
    timeline = run(waves, machine.ranks, lambda turn: turn_seconds(machine, turn))
    layers = machine.work.layers
    computing = 0.0
    inside = 0.0
    between = 0.0
    most_tokens: dict[int, int] = {}
    for turns in waves:
        for turn in turns:
            computing += turn.size * sum(computing_seconds(machine, turn))
            needed = -(-sum(turn.lengths) // turn.size)
            most_tokens[turn.size] = max(most_tokens.get(turn.size, 0), needed)
            # Keys and values go forth in both passes, and gradients once: three times round.
            ring = 3 * layers * (turn.size - 1) * turn.tokens * row_bytes(machine.work)
            crossing = _crossing_share(machine, turn)
            between += ring * turn.size * crossing
            inside += ring * turn.size * (1 - crossing)
    memory = 0.0
    for size, tokens in most_tokens.items():
        plan = ring_plan(min(tokens, capacity), size)
        memory = max(memory, machine.memory(plan))
    ranks = machine.ranks
    return Outcome(
        name=name,
        capacity=capacity,
        seconds=timeline.end,
        computing=computing / ranks,
        sent=Sent(inside / ranks, between / ranks),
        memory=memory,
        sizes=tuple(sorted(most_tokens)),
    )


def _crossing_share(machine: Machine, turn: Turn) -> float:
    """Return the share of a ring's ranks whose next rank is on another node."""
    nodes = np.array(turn.ranks) // machine.cluster.gpus_per_node
    return float(np.count_nonzero(nodes != np.roll(nodes, -1))) / turn.size
