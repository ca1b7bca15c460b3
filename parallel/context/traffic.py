"""What a plan sends to whom, in bytes: point to point, and in collectives, which count what each peer is sent."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from parallel.context.lasp import passages

if TYPE_CHECKING:
    from parallel.context.plan import Plan

Moves = Literal["kv", "queries"]
"""What circulates in a backward: KV with its gradient, or queries (q, dout, out, lse) with theirs."""


class Message(NamedTuple):
    """Bytes to one peer, under way from round ``first`` to ``last``; the number of rounds is after them all."""

    peer: int
    size: int
    first: int
    last: int


class Collective(NamedTuple):
    """An all-gather or an all-to-all among ``ranks``, and the bytes of a rank for each of its peers."""

    kind: Literal["gather", "exchange"]
    ranks: tuple[int, ...]
    size: int


@dataclass
class Traffic:
    """Bytes that one rank sends to each peer."""

    p2p: Counter[int] = field(default_factory=Counter)
    collective: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes to all peers."""
        return self.p2p.total() + self.collective.total()

    def between_nodes(self, rank: int, ranks_per_node: int) -> int:
        """Bytes of ``rank`` that leave its node, each node having ``ranks_per_node`` consecutive ranks."""
        sent = self.p2p + self.collective
        return sum(count for peer, count in sent.items() if peer // ranks_per_node != rank // ranks_per_node)


@dataclass(frozen=True)
class Cost:
    """What one attention costs one rank: (query, key) pairs per round, bytes sent, and what the backward moves."""

    pairs: tuple[int, ...]
    forward: Traffic
    backward: Traffic
    backward_moves: Moves


class Sizes(NamedTuple):
    """A rank's tensors inside the exchange of heads: q ``[batch, tokens, heads, head_dim]``, k and v ``kv_heads``.

    Of linear attention, v and out may be ``value_dim`` wide instead.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    element_size: int
    value_dim: int | None = None

    @property
    def values(self) -> int:
        """Width of v and out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def wide(self) -> int:
        """Bytes of an element of lse, partial results and gradients on their way."""
        return max(4, self.element_size)

    def payload(self, moves: Moves) -> int:
        """Bytes of k and v, or of q, dout, out and lse."""
        rows = self.batch * self.tokens
        if moves == "kv":
            return 2 * rows * self.kv_heads * self.head_dim * self.element_size
        return rows * self.heads * (3 * self.head_dim * self.element_size + self.wide)

    @property
    def state(self) -> int:
        """Bytes of a state of linear attention, or of its gradient: a matrix per head, however many tokens."""
        return self.batch * self.heads * self.head_dim * self.values * self.wide

    def gradient(self, moves: Moves) -> int:
        """Bytes of dk and dv, or of dq."""
        channels = (2 * self.kv_heads if moves == "kv" else self.heads) * self.head_dim
        return self.batch * self.tokens * channels * self.wide


def sizes(
    plan: "Plan",
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element_size: int,
    value_dim: int | None = None,
) -> Sizes:
    """The sizes that ``heads`` and ``kv_heads`` of every token become where Ulysses splits them."""
    degree = plan.ulysses_degree
    tokens = plan.local_len * degree
    return Sizes(batch, tokens, heads // degree, max(1, kv_heads // degree), head_dim, element_size, value_dim)


def messages(plan: "Plan", rank: int, of: Sizes, moves: Moves, *, gradients: bool) -> Iterator[Message]:
    """What ``rank`` sends point to point in a forward (without gradients) or a backward."""
    for index, step in enumerate(plan.steps(rank)):
        held = len(step.holds) // plan.ulysses_degree
        for transfer in step.transfers:
            if transfer.send_to != rank:
                yield Message(transfer.send_to, held * of.payload(moves), index, transfer.due - 1)
        home = step.gradient
        if gradients and home is not None and home.send_to != rank:
            yield Message(home.send_to, held * of.gradient(moves), index + 1, home.due)


def collectives(plan: "Plan", rank: int, of: Sizes, moves: Moves | None) -> Iterator[Collective]:
    """Those of ``rank`` in a backward that moves KV or queries, or (None) in a forward, groups of one left out.

    Of the heads: q, k, v there and out back, or dout there and dq, dk, dv back.
    """
    heads, holders, team = plan.head_group(rank), plan.holders(rank), plan.teammates(rank)
    rows = of.batch * of.tokens
    channel = of.batch * plan.local_len * of.element_size
    found = [
        Collective("exchange", heads, ((of.heads + of.kv_heads) * of.head_dim + of.kv_heads * of.values) * channel),
        Collective("exchange", heads, of.heads * of.values * channel),
    ]
    if moves is None:
        found += [
            Collective("gather", holders, of.payload("kv")),
            Collective("gather", team, rows * of.heads * of.head_dim * of.element_size),  # q
            Collective("exchange", team, rows * of.heads * (of.head_dim + 1) * of.wide),  # partial out and lse
        ]
    else:
        stays: Moves = "queries" if moves == "kv" else "kv"
        for ranks, what in ((holders, moves), (team, stays)):
            found += [
                Collective("gather", ranks, of.payload(what)),
                Collective("exchange", ranks, of.gradient(what)),
            ]
    return (collective for collective in found if len(collective.ranks) > 1)


def forward_traffic(plan: "Plan", rank: int, of: Sizes) -> Traffic:
    """What ``rank`` sends in a forward."""
    total = _sum(rank, messages(plan, rank, of, "kv", gradients=False), collectives(plan, rank, of, None))
    _pass_states(total, plan, rank, of, reverse=False)
    return total


def backward_traffic(plan: "Plan", rank: int, of: Sizes, moves: Moves) -> Traffic:
    """What ``rank`` sends in a backward that moves KV or queries."""
    total = _sum(rank, messages(plan, rank, of, moves, gradients=True), collectives(plan, rank, of, moves))
    _pass_states(total, plan, rank, of, reverse=True)
    return total


def _sum(rank: int, sent: Iterable[Message], joint: Iterable[Collective]) -> Traffic:
    total = Traffic()
    for message in sent:
        total.p2p[message.peer] += message.size
    for collective in joint:
        for peer in collective.ranks:
            if peer != rank:
                total.collective[peer] += collective.size
    return total


@lru_cache(maxsize=256)
def cheaper_backward(plan: "Plan", of: Sizes) -> Moves:
    """What the backward moves: as the plan says, or what sends fewer bytes over all ranks."""
    if plan.backward != "auto":
        return plan.backward
    kv, queries = (
        sum(backward_traffic(plan, rank, of, moves).total for rank in range(plan.size)) for moves in ("kv", "queries")
    )
    return "kv" if kv <= queries else "queries"


def _pass_states(sent: Traffic, plan: "Plan", rank: int, of: Sizes, *, reverse: bool) -> None:
    """The state, or backwards its gradient, B d^2 / h elements."""
    way, count = plan.method.capabilities().states, of.state
    if way == "gather":
        for peer in range(plan.size):
            if peer != rank:
                sent.collective[peer] += count
    elif way == "neighbour" and (target := passages(plan, reverse)[rank].target) is not None:
        sent.p2p[target] += count
