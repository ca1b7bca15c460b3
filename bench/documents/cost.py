"""Predicted seconds, bytes and memory of a step over mixed documents, for each way to share them.

One group of all ranks is predicted by the planner, micro-batch by micro-batch, with the plan of its
documents; equal groups likewise. Groups by length are predicted by the same rates: the matmuls and
pointwise work of a rank's tokens, the pairs of its documents, and a ring that passes keys and
values on while a round's pairs are computed. All ranks exchange weights and gradients, and the
computing of each way hides a part.

Every kernel has a fixed time: a ring launches one a round, an exchange as many as ``kernels.cuda``.
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
from planner.step_cost import data_seconds, step_seconds
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
    method: str = "ring"

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
    ring_gradient_bytes: int = 2
    """Bytes of an element of the gradients that the rings of groups send."""

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
        plan = ring_plan(CAPACITIES[-1], 1)
        work = replace(self.work, micro_batches=1)
        seconds = step_seconds(work, plan, self.divided(plan), self.cluster)[0]
        return (seconds["linear"] + seconds["recompute"]) / CAPACITIES[-1]

    @cached_property
    def exchange_seconds(self) -> float:
        """Seconds of a step's exchange of weights and gradients, if nothing hides it."""
        plan = ring_plan(CAPACITIES[-1], 1)
        return data_seconds(self.work, plan, self.divided(plan), self.cluster)

    def exposed_seconds(self, computing: float) -> float:
        """Return the seconds of the exchange that ``computing`` seconds do not hide."""
        exchange = self.exchange_seconds
        return max(self.cluster.exposed_share * exchange, exchange - computing)

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


class Method(NamedTuple):
    """A setting of Longmesh that a user can choose for packed documents."""

    name: str
    splits_heads: bool = False
    """True if the ranks of a node split the heads among themselves (``ulysses_degree``)."""
    stages: int = 1
    """Number of parts of the heads, one after the other (``ulysses_head_chunks``)."""

    @property
    def title(self) -> str:
        title = f"{self.name}, heads in a node" if self.splits_heads else self.name
        return f"{title}, in {self.stages} stages" if self.stages > 1 else title


METHODS = (
    Method("exchange"),
    Method("exchange", splits_heads=True),
    Method("exchange", splits_heads=True, stages=2),
    Method("zigzag", splits_heads=True),
    Method("double_ring"),
)
"""Settings to try. Two stages send keys and values twice, and take less memory."""


@lru_cache(maxsize=512)
def documents_plan(method: Method, size: int, per_node: int, documents: tuple[int, ...]) -> Plan:
    """Return the plan of ``size`` ranks for a micro-batch; ``documents`` are cumulative lengths."""
    degree = per_node if method.splits_heads else 1
    return make_plan(
        method.name,
        seq_len=documents[-1],
        size=size,
        documents=documents,
        ranks_per_node=per_node,
        ulysses_degree=degree,
        ulysses_head_chunks=method.stages,
    )


def plans_of(
    machine: Machine, batches: Sequence[np.ndarray], method: Method = METHODS[0]
) -> list[Plan]:
    """Return the plans of micro-batches of documents over all ranks."""
    per_node = machine.cluster.gpus_per_node
    plans = []
    for lengths in batches:
        documents = (0, *np.cumsum(lengths).tolist())
        plans.append(documents_plan(method, machine.ranks, per_node, documents))
    return plans


def one_group(machine: Machine, plans: Sequence[Plan], method: Method = METHODS[0]) -> Outcome:
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
        method=method.title,
    )


def parts_of(
    machine: Machine, size: int, method: Method, batches: Sequence[np.ndarray]
) -> list[Outcome]:
    """Predict each micro-batch alone, if ``size`` ranks share it."""
    group = replace(machine, ranks=size)
    parts = []
    for plan in plans_of(group, batches, method):
        part = one_group(group, [plan], method)
        parts.append(replace(part, memory=machine.memory(plan)))
    return parts


def equal_groups(
    machine: Machine, name: str, parts: Sequence[Outcome], *, by_work: bool
) -> Outcome:
    """Predict a step in which groups of one size share each of their own micro-batches.

    Groups take the micro-batches ``parts`` in turn or, ``by_work``, the longest first, each to the
    group that is free first; a group does not wait for others before the step's end.
    """
    (size,) = parts[0].sizes
    if by_work:
        parts = sorted(parts, key=lambda part: -part.seconds)
    ready = np.zeros(machine.ranks // size)
    computing = 0.0
    inside = 0.0
    between = 0.0
    for number, part in enumerate(parts):
        index = int(ready.argmin()) if by_work else number % len(ready)
        ready[index] += part.seconds
        computing += part.computing
        inside += part.sent.inside
        between += part.sent.between
    return Outcome(
        name=name,
        capacity=parts[0].capacity,
        seconds=float(ready.max()),
        computing=computing / len(ready),
        sent=Sent(inside / len(ready), between / len(ready)),
        memory=max(part.memory for part in parts),
        sizes=(size,),
        method=parts[0].method,
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


def crossing_rate(machine: Machine, turn: Turn) -> float:
    """Return the bytes per second of a ring's link to the next node.

    One rank of a node sends to the next node, and has a shared link for itself, unless other rings
    of this size have ranks on its node.
    """
    cluster = machine.cluster
    if cluster.between_link == "rank":
        return cluster.between_bytes_per_s
    max_rings = 1
    for node in {machine.node_of(rank) for rank in turn.ranks}:
        first = node * cluster.gpus_per_node
        last = first + cluster.gpus_per_node - 1
        max_rings = max(max_rings, last // turn.size - first // turn.size + 1)
    return cluster.between_bytes_per_s / max_rings


def backward_factor(machine: Machine) -> float:
    """Return the bytes of a ring's backward pass, of keys, values and gradients, over forward's."""
    return 1 + machine.ring_gradient_bytes / machine.work.element_size


def turn_seconds(machine: Machine, turn: Turn) -> float:
    """Predict the seconds of a turn: a ring of ``size`` rounds, computing hides what it sends.

    The backward pass sends keys and values and, as far again, their gradients.
    """
    linear, forward, backward = computing_seconds(machine, turn)
    linear += machine.launch_seconds(turn.size)
    if turn.size == 1:
        return linear + forward + backward
    cluster = machine.cluster
    rate = cluster.inside_bytes_per_s
    latency = cluster.inside_latency_us * MICRO
    if machine.node_of(turn.first) != machine.node_of(turn.ranks[-1]):
        rate = crossing_rate(machine, turn)
        latency = cluster.between_latency_us * MICRO

    layers = machine.work.layers
    sending = turn.tokens * row_bytes(machine.work) / rate
    transfer = layers * (sending + latency)
    backward_transfer = layers * (sending + latency) * backward_factor(machine)
    hops = turn.size - 1
    seconds = linear
    for computing, sent in ((forward, transfer), (backward, backward_transfer)):
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
    max_tokens: dict[int, int] = {}
    for turns in waves:
        for turn in turns:
            computing += turn.size * sum(computing_seconds(machine, turn))
            needed = -(-sum(turn.lengths) // turn.size)
            max_tokens[turn.size] = max(max_tokens.get(turn.size, 0), needed)
            passes = 1 + backward_factor(machine)
            ring = passes * layers * (turn.size - 1) * turn.tokens * row_bytes(machine.work)
            crossing = _crossing_share(machine, turn)
            between += ring * turn.size * crossing
            inside += ring * turn.size * (1 - crossing)
    memory = 0.0
    for size, tokens in max_tokens.items():
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
        sizes=tuple(sorted(max_tokens)),
    )


def _crossing_share(machine: Machine, turn: Turn) -> float:
    """Return the share of a ring's ranks whose next rank is on another node."""
    nodes = np.array(turn.ranks) // machine.cluster.gpus_per_node
    return float(np.count_nonzero(nodes != np.roll(nodes, -1))) / turn.size
