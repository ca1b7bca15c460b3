"""Count the bytes that a geometry sends between ranks, point to point and in collectives.

Either whole keys, values and queries travel, or only the rows that a query sees (``Plan.sparse``).
A collective counts the bytes sent to each peer. States pass to the next rank only inside a
document, so their bytes depend on ``boundaries``, the start positions of all documents but the
first.

The counts are exact, not estimates. A transport counts the bytes that it sends, and tests compare
the two for every method, so the planner's bytes and the tables in the documentation cannot drift
from the code.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import gcd
from typing import Literal, NamedTuple

import numpy as np

from parallel.context.geometry import Geometry, Moves
from parallel.context.layout import passages
from parallel.context.sparse.flow import Flow, Parcel
from parallel.context.sparse.rows import count


class Message(NamedTuple):
    """A message of ``size`` bytes from each rank to one peer or, in a collective, to several.

    ``to`` is int64 ``[ranks]``, or ``[ranks, members]`` in a collective. A rank sends nothing to
    itself. The message is in transit from round ``first`` to round ``last``; a value equal to the
    number of rounds means after the last round.
    """

    to: np.ndarray
    size: int
    first: int = 0
    last: int = 0
    kind: Literal["p2p", "gather", "exchange"] = "p2p"


@dataclass
class Traffic:
    """Number of bytes that one rank sends to each peer."""

    p2p: Counter[int] = field(default_factory=Counter)
    collective: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Number of bytes sent to all peers."""
        return self.p2p.total() + self.collective.total()

    def between_nodes(self, rank: int, ranks_per_node: int) -> int:
        """Return the bytes that ``rank`` sends to other nodes of ``ranks_per_node`` ranks."""
        node = rank // ranks_per_node
        total = 0
        for peer, size in (self.p2p + self.collective).items():
            if peer // ranks_per_node != node:
                total += size
        return total


@dataclass(frozen=True)
class Cost:
    """Cost of one attention for one rank.

    It consists of the number of (query, key) pairs per round, the bytes sent, and the operands that
    the backward pass sends.
    """

    pairs: tuple[int, ...]
    forward: Traffic
    backward: Traffic
    backward_moves: Moves


class Sizes(NamedTuple):
    """Tensor sizes after the exchange of heads: q ``[batch, tokens, heads, head_dim]``.

    k and v have ``kv_heads`` heads. In linear attention the width of v and out may be ``value_dim``
    instead of ``head_dim``.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    element_size: int
    value_dim: int | None = None
    stages: int = 1
    """Number of stages in which heads are exchanged; KV circulates once for each stage that attends
    to it."""

    @property
    def kv_passes(self) -> int:
        """Number of stages that attend with the same KV heads: KV circulates that many times."""
        return self.stages // gcd(self.stages, self.kv_heads)

    @property
    def stage(self) -> "Sizes":
        """Sizes of the tensors with which one stage attends."""
        turns = gcd(self.stages, self.kv_heads)
        return self._replace(
            heads=self.heads // self.stages, kv_heads=self.kv_heads // turns, stages=1
        )

    @property
    def values(self) -> int:
        """Width of v and out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def wide(self) -> int:
        """Number of bytes per element of lse, partial results and gradients in transit."""
        return max(4, self.element_size)

    def payload(self, moves: Moves) -> int:
        """Return the bytes of one rank's circulating operands: k and v, or q, dout, out and lse.

        The operands travel in the dtype of activations, lse in float32 or wider.
        """
        rows = self.batch * self.tokens
        if moves == "kv":
            return 2 * rows * self.kv_passes * self.kv_heads * self.head_dim * self.element_size
        return rows * self.heads * (3 * self.head_dim * self.element_size + self.wide)

    @property
    def state(self) -> int:
        """Number of bytes of a linear-attention state or its gradient, one matrix per head."""
        return self.batch * self.heads * self.head_dim * self.values * self.wide

    def gradient(self, moves: Moves) -> int:
        """Return the bytes of the operands' gradients: dk and dv, or dq.

        They are partial sums, so they travel in float32 or wider.
        """
        heads = self.heads
        if moves == "kv":
            heads = 2 * self.kv_passes * self.kv_heads
        return self.batch * self.tokens * heads * self.head_dim * self.wide


def sizes(
    geometry: Geometry,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element_size: int,
    value_dim: int | None = None,
) -> Sizes:
    """Return the sizes on one rank after Ulysses splits ``heads`` and ``kv_heads``."""
    degree = geometry.ulysses_degree
    return Sizes(
        batch=batch,
        tokens=geometry.local_len * degree,
        heads=heads // degree,
        kv_heads=max(1, kv_heads // degree),
        head_dim=head_dim,
        element_size=element_size,
        value_dim=value_dim,
        stages=geometry.options.ulysses_head_chunks,
    )


def messages(
    geometry: Geometry, dims: Sizes, moves: Moves, *, gradients: bool, boundaries: tuple[int, ...]
) -> Iterator[Message]:
    """Yield the point-to-point messages of a forward or, with ``gradients``, a backward pass.

    Args:
        geometry: the geometry whose rounds, or passages of states, send messages.
        dims: sizes on one rank.
        moves: operands that circulate.
        boundaries: start positions of all documents but the first.
    """
    for index, step in enumerate(geometry.rounds):
        payload = len(step.holds) * dims.payload(moves)
        for send in step.sends:
            yield Message(geometry.at_ranks(send.to), payload, index, send.due - 1)
        if gradients and step.gradient is not None:
            gradient = len(step.holds) * dims.gradient(moves)
            targets = geometry.at_ranks(step.gradient.to)
            yield Message(targets, gradient, index + 1, step.gradient.due)

    if geometry.method.states == "neighbour":
        for slot in range(geometry.slots):
            next_ranks = np.arange(geometry.size)
            for passage in passages(geometry.layout, boundaries, gradients):
                if passage.slot == slot and passage.target is not None:
                    next_ranks[passage.rank] = passage.target
            yield Message(next_ranks, dims.state, 0, 0)


def collectives(
    geometry: Geometry, dims: Sizes, moves: Moves | None, *, holders_join: bool = True
) -> Iterator[Message]:
    """Yield the collectives of a forward pass (if ``moves`` is None) or of a backward pass.

    Groups of one rank are skipped. Heads are exchanged in a forward pass

        to heads: q, k, v           to tokens: out (in stages also lse)

    and in a backward pass

        to heads: dout (in stages also q, k, v, out, lse)       to tokens: dq, dk, dv

    Without ``holders_join`` KV is not gathered first, since only the needed rows travel.
    """
    heads = geometry.head_groups
    holders = geometry.holder_groups
    team = geometry.team_groups
    rows = dims.batch * dims.tokens
    local_rows = dims.batch * geometry.local_len
    channel = local_rows * dims.element_size
    qkv_channels = (dims.heads + dims.kv_heads) * dims.head_dim + dims.kv_heads * dims.values

    operations = [
        Message(heads, qkv_channels * channel, kind="exchange"),
        Message(heads, dims.heads * dims.values * channel, kind="exchange"),
    ]
    if dims.stages > 1:
        lse = Message(heads, local_rows * dims.heads * dims.wide, kind="exchange")
        if moves is not None:
            operations *= 2  # q, k, v and out are exchanged once more in the backward
        operations.append(lse)

    if moves is None:
        if holders_join:
            operations.append(Message(holders, dims.payload("kv"), kind="gather"))
        q = rows * dims.heads * dims.head_dim * dims.element_size
        out_and_lse = rows * dims.heads * (dims.head_dim + 1) * dims.wide
        operations.append(Message(team, q, kind="gather"))
        operations.append(Message(team, out_and_lse, kind="exchange"))
    else:
        if holders_join:
            operations.append(Message(holders, dims.payload(moves), kind="gather"))
            operations.append(Message(holders, dims.gradient(moves), kind="exchange"))
        stationary: Moves = "queries" if moves == "kv" else "kv"
        operations.append(Message(team, dims.payload(stationary), kind="gather"))
        operations.append(Message(team, dims.gradient(stationary), kind="exchange"))

    if geometry.method.states == "gather":
        everyone = np.broadcast_to(np.arange(geometry.size), (geometry.size, geometry.size))
        operations.append(Message(everyone, geometry.slots * dims.state, kind="gather"))
    return (collective for collective in operations if collective.to.shape[1] > 1)


def whole_traffic(
    geometry: Geometry, rank: int, dims: Sizes, moves: Moves | None, boundaries: tuple[int, ...]
) -> Traffic:
    """Return the bytes that ``rank`` sends if whole tensors circulate.

    ``moves`` None means a forward pass, otherwise a backward pass that moves KV or queries.
    """
    with_gradients = moves is not None
    sent = messages(geometry, dims, moves or "kv", gradients=with_gradients, boundaries=boundaries)
    return _sum(rank, chain(sent, collectives(geometry, dims, moves)))


def needed_traffic(flow: Flow, rank: int, dims: Sizes, moves: Moves | None) -> Traffic:
    """Return the bytes that ``rank`` sends if only the rows that a query sees travel.

    ``moves`` None means a forward pass, otherwise a backward pass that moves KV or queries.
    ``flow`` must be the plan's flow for these moves (for a forward pass, KV).
    """
    total = _sum(rank, collectives(flow.geometry, dims, moves, holders_join=False))
    for parcel, size, _ in parcels(flow, rank, dims, moves or "kv", gradients=moves is not None):
        if parcel.peer != rank:
            total.p2p[parcel.peer] += size
    return total


def parcels(
    flow: Flow, rank: int, dims: Sizes, moves: Moves, *, gradients: bool
) -> Iterator[tuple[Parcel, int, range]]:
    """Yield the parcels that a rank sends, with their bytes and the rounds in which they travel."""
    row = dims.payload(moves) // dims.tokens
    gradient_row = dims.gradient(moves) // dims.tokens
    for parcel in flow.start(rank).sends:
        yield parcel, count(parcel.rows) * row, range(1)
    for index in range(flow.rounds):
        for parcel in flow.moves(rank, index).sends:
            yield parcel, count(parcel.rows) * row, range(index, parcel.due)
        if gradients:
            for parcel in flow.gradients(rank, index).sends:
                yield parcel, count(parcel.rows) * gradient_row, range(index + 1, parcel.due + 1)


def _sum(rank: int, sent: Iterable[Message]) -> Traffic:
    """Add up the messages that one rank sends."""
    total = Traffic()
    for message in sent:
        counts = total.p2p if message.kind == "p2p" else total.collective
        for peer in message.to[rank : rank + 1].ravel().tolist():
            if peer != rank:
                counts[peer] += message.size
    return total


def bytes_of_all(
    geometry: Geometry,
    dims: Sizes,
    moves: Moves | None,
    ranks_per_node: int,
    boundaries: tuple[int, ...],
) -> tuple[int, int]:
    """Return the bytes that all ranks send: (within nodes, between nodes).

    ``moves`` None means a forward pass, otherwise a backward pass that moves KV or queries.
    """
    with_gradients = moves is not None
    sent = messages(geometry, dims, moves or "kv", gradients=with_gradients, boundaries=boundaries)
    # The rounds of a ring share one array of targets, so its peers are processed once, not once per
    # round.
    targets: dict[int, np.ndarray] = {}
    bytes_to: Counter[int] = Counter()
    for message in chain(sent, collectives(geometry, dims, moves)):
        targets[id(message.to)] = message.to
        bytes_to[id(message.to)] += message.size

    # Messages from a rank to itself are not sent; some of the others leave the node.
    inside = 0
    between = 0
    rank = np.arange(geometry.size)[:, None]
    for key, to in targets.items():
        peers = to.reshape(geometry.size, -1)
        num_messages = int(np.count_nonzero(peers != rank))
        other_node = peers // ranks_per_node != rank // ranks_per_node
        num_between = int(np.count_nonzero(other_node))

        inside += bytes_to[key] * (num_messages - num_between)
        between += bytes_to[key] * num_between
    return inside, between


@lru_cache(maxsize=256)
def cheaper_backward(geometry: Geometry, dims: Sizes) -> Moves:
    """Return the operands that the backward pass sends, by default those with fewer bytes.

    With few KV heads (grouped-query attention) KV and its gradient are smaller. With as many KV
    heads as query heads, q, dout, out, lse and dq can be smaller than k, v, dk and dv, since
    gradients travel in float32.
    """
    if geometry.options.backward != "auto":
        return geometry.options.backward
    kv = sum(bytes_of_all(geometry, dims, "kv", geometry.size, ()))
    queries = sum(bytes_of_all(geometry, dims, "queries", geometry.size, ()))
    return "kv" if kv <= queries else "queries"
