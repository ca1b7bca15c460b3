"""Predicted time of one layer's attention on a cluster. Needs no process.

Ranks are taken to go in step: a round of attention lasts as long as its slowest rank computes, or as its busiest link
is busy. Collectives, and what is sent after the last round, hide behind nothing. A rank of cp and its neighbours of tp
fill nodes in order.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from parallel.cluster import Cluster
from parallel.context.lasp import passages
from parallel.context.plan import Plan
from parallel.context.traffic import Collective, Moves, Sizes, cheaper_backward, collectives, messages

FORWARD, BACKWARD = 4, 10
"""Operations per (query, key) pair and channel: 2 matrix products forward, 5 backward (Dao 2023)."""
SCAN, STATE = 4, 2
"""Operations per token and element of a state: to write and read it, and to write alone. A backward has 3 scans."""
MICRO, GB = 1e-6, 1e9


@dataclass(frozen=True)
class Links:
    """Bytes that the attention of all ranks of a cp group sends in one layer, forward and backward."""

    inside: int
    between: int


@dataclass
class _Slot:
    """A round of all ranks, or a collective: computing, and bytes and messages (or parts of one) to peers."""

    computing: float = 0.0
    sent: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))

    def send(self, rank: int, peer: int, count: float, messages: float) -> None:
        self.sent[rank, peer] += count
        self.messages[rank, peer] += messages


@dataclass(frozen=True)
class AttentionCost:
    """The attention of one layer, the ranks of cp together."""

    plan: Plan
    of: Sizes
    cluster: Cluster
    tp: int = 1

    def forward(self) -> float:
        """Seconds of a forward."""
        if self.plan.method.capabilities().states:
            return self._state_seconds(SCAN, reverse=False)
        return self._seconds("kv", None, FORWARD)

    def backward(self) -> float:
        """Seconds of a backward, whose forward is not computed again."""
        if self.plan.method.capabilities().states:
            return self._state_seconds(3 * SCAN, reverse=True)
        moves = cheaper_backward(self.plan, self.of)
        return self._seconds(moves, moves, BACKWARD)

    def links(self) -> Links:
        """What crosses which links, forward and backward, as the plan counts it."""
        of = self.of
        degree = self.plan.ulysses_degree
        shape = {"heads": of.heads * degree, "kv_heads": of.kv_heads * degree, "head_dim": of.head_dim}
        inside = between = 0
        for rank in range(self.plan.size):
            cost = self.plan.cost(rank, batch=of.batch, element_size=of.element_size, **shape)
            for traffic in (cost.forward, cost.backward):
                crossing = traffic.between_nodes(rank, self._per_node)
                between += crossing
                inside += traffic.total - crossing
        return Links(inside, between)

    @property
    def _per_node(self) -> int:
        return max(1, self.cluster.gpus_per_node // self.tp)

    def _seconds(self, moves: Moves, backward: Moves | None, operations: int) -> float:
        plan, of = self.plan, self.of
        per_pair = operations * of.batch * of.heads * of.head_dim
        slots = [_Slot() for _ in range(len(plan.steps(0)) + 1)]
        joint: dict[int, _Slot] = defaultdict(_Slot)
        for rank in range(plan.size):
            for index, step in enumerate(plan.rounds(rank, moves)):
                busy = step.pairs * per_pair / self._rate + len(step.tiles) * self.cluster.launch_us * MICRO
                slots[index].computing = max(slots[index].computing, busy)
            for message in messages(plan, rank, of, moves, gradients=backward is not None):
                under_way = range(message.first, message.last + 1)
                for index in under_way:
                    slots[index].send(rank, message.peer, message.size / len(under_way), 1 / len(under_way))
            for index, collective in enumerate(collectives(plan, rank, of, backward)):
                _join(joint[index], rank, collective)
        rounds = sum(max(slot.computing, self._transfer(slot)) for slot in slots)
        return rounds + sum(map(self._transfer, joint.values()))

    def _state_seconds(self, operations: int, *, reverse: bool) -> float:
        """Linear attention: from neighbour to neighbour states wait in a row; gathered, they hide behind the scan."""
        plan, of = self.plan, self.of
        elements = of.batch * of.tokens * of.heads * of.head_dim**2
        scan, slots = operations * elements / self._rate, [_Slot()]
        if plan.method.capabilities().states == "gather":
            for rank in range(plan.size):
                _join(slots[0], rank, Collective("gather", tuple(range(plan.size)), of.state))
            return STATE * elements / self._rate + max(scan, self._transfer(slots[0]))
        for rank, way in enumerate(passages(plan, reverse)):
            if way.target is not None:
                slots.append(_Slot())
                slots[-1].send(rank, way.target, of.state, 1)
        return scan + sum(map(self._transfer, slots))

    @property
    def _rate(self) -> float:
        return 1e12 * self.cluster.peak_tflops * self.cluster.attention_fraction

    def _transfer(self, slot: _Slot) -> float:
        """Seconds until the busiest rank, or the busiest node's shared link, has sent what is to be sent."""
        cluster, shared = self.cluster, self.cluster.between_link == "node"
        busy: dict[tuple[str, int], float] = defaultdict(float)
        waiting: dict[tuple[int, int], float] = defaultdict(float)  # messages to several peers set out together
        for (rank, peer), count in slot.sent.items():
            node = rank // self._per_node
            if peer // self._per_node == node:
                busy["rank", rank] += count / (cluster.inside_gb_per_s * GB)
                latency = cluster.inside_latency_us
            else:
                link = ("link", node if shared else rank)
                busy[link] += count * (self.tp if shared else 1) / (cluster.between_gb_per_s * GB)
                latency = cluster.between_latency_us
            waiting[rank, peer] += slot.messages[rank, peer] * latency * MICRO
        return max(busy.values(), default=0.0) + max(waiting.values(), default=0.0)


def _join(slot: _Slot, rank: int, collective: Collective) -> None:
    """An all-gather goes round a ring, as libraries do it; an all-to-all straight to each peer."""
    ranks, size = collective.ranks, collective.size
    others = len(ranks) - 1
    if collective.kind == "gather":
        following = ranks[(ranks.index(rank) + 1) % len(ranks)]
        slot.send(rank, following, others * size, others)
        return
    for peer in ranks:
        if peer != rank:
            slot.send(rank, peer, size, 1)
