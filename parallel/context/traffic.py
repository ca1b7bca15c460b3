"""What a plan sends to whom, in bytes: point to point, and in collectives, which count what each peer is sent."""

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from parallel.context.lasp import passages

if TYPE_CHECKING:
    from parallel.context.plan import Plan

Moves = Literal["kv", "queries"]
"""What circulates in a backward: KV with its gradient, or queries (q, dout, out, lse) with theirs."""


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
    """A rank's tensors inside the exchange of heads: q ``[batch, tokens, heads, head_dim]``, k and v ``kv_heads``."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    element_size: int

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

    def gradient(self, moves: Moves) -> int:
        """Bytes of dk and dv, or of dq."""
        channels = (2 * self.kv_heads if moves == "kv" else self.heads) * self.head_dim
        return self.batch * self.tokens * channels * self.wide


def sizes(plan: "Plan", batch: int, heads: int, kv_heads: int, head_dim: int, element_size: int) -> Sizes:
    """The sizes that ``heads`` and ``kv_heads`` of every token become where Ulysses splits them."""
    degree = plan.ulysses_degree
    tokens = plan.local_len * degree
    return Sizes(batch, tokens, heads // degree, max(1, kv_heads // degree), head_dim, element_size)


def forward_traffic(plan: "Plan", rank: int, of: Sizes) -> Traffic:
    """What ``rank`` sends in a forward."""
    sent = Traffic()
    rows = of.batch * of.tokens
    _exchange_heads(sent, plan, rank, of)
    _pass_states(sent, plan, rank, of, reverse=False)
    _to_all(sent, plan.holders(rank), rank, of.payload("kv"))
    _to_all(sent, plan.teammates(rank), rank, rows * of.heads * of.head_dim * of.element_size)  # q
    for step in plan.steps(rank):
        for transfer in step.transfers:
            _to(sent, transfer.send_to, rank, of.payload("kv") * len(step.holds) // plan.ulysses_degree)
    _to_all(sent, plan.teammates(rank), rank, rows * of.heads * (of.head_dim + 1) * of.wide)  # partial out and lse
    return sent


def backward_traffic(plan: "Plan", rank: int, of: Sizes, moves: Moves) -> Traffic:
    """What ``rank`` sends in a backward that moves KV or queries."""
    sent = Traffic()
    stays: Moves = "queries" if moves == "kv" else "kv"
    _exchange_heads(sent, plan, rank, of)
    _pass_states(sent, plan, rank, of, reverse=True)
    _to_all(sent, plan.holders(rank), rank, of.payload(moves) + of.gradient(moves))
    _to_all(sent, plan.teammates(rank), rank, of.payload(stays) + of.gradient(stays))
    for step in plan.steps(rank):
        held = len(step.holds) // plan.ulysses_degree
        for transfer in step.transfers:
            _to(sent, transfer.send_to, rank, held * of.payload(moves))
        if step.gradient is not None:
            _to(sent, step.gradient.send_to, rank, held * of.gradient(moves))
    return sent


@lru_cache(maxsize=256)
def cheaper_backward(plan: "Plan", of: Sizes) -> Moves:
    """What the backward moves: as the plan says, or what sends fewer bytes over all ranks."""
    if plan.backward != "auto":
        return plan.backward
    kv, queries = (
        sum(backward_traffic(plan, rank, of, moves).total for rank in range(plan.size)) for moves in ("kv", "queries")
    )
    return "kv" if kv <= queries else "queries"


def _exchange_heads(sent: Traffic, plan: "Plan", rank: int, of: Sizes) -> None:
    """q, k, v there and out back, or dout there and dq, dk, dv back."""
    rows = of.batch * plan.local_len
    _to_all(sent, plan.head_group(rank), rank, 2 * rows * (of.heads + of.kv_heads) * of.head_dim * of.element_size)


def _pass_states(sent: Traffic, plan: "Plan", rank: int, of: Sizes, *, reverse: bool) -> None:
    """The state, or backwards its gradient: a matrix per head, B d^2 / h elements however many tokens."""
    way, count = plan.method.capabilities().states, of.batch * of.heads * of.head_dim**2 * of.wide
    if way == "gather":
        _to_all(sent, tuple(range(plan.size)), rank, count)
    elif way == "neighbour" and (target := passages(plan, reverse)[rank].target) is not None:
        _to(sent, target, rank, count)


def _to(sent: Traffic, peer: int, rank: int, count: int) -> None:
    if peer != rank:
        sent.p2p[peer] += count


def _to_all(sent: Traffic, group: tuple[int, ...], rank: int, count: int) -> None:
    for peer in group:
        if peer != rank:
            sent.collective[peer] += count
