"""Bytes that a geometry sends between ranks: point to point, and in collectives, counted per peer.

Of one whole document all keys, values and queries travel; under other masks, the rows that a query
sees. A state passes to the next rank only inside a document: ``boundaries`` are the starts of all
documents but the first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from math import gcd
from typing import Literal, NamedTuple

import numpy as np

from parallel.context.geometry import Geometry, Moves
from parallel.context.layout import passages
from parallel.context.sparse.flow import Flow, Parcel
from parallel.context.sparse.rows import count


class Message(NamedTuple):
    """``size`` bytes from each rank to a peer, int64 ``[ranks]``, or in a collective to several:
    ``[ranks, members]``.

    A rank sends nothing to itself. In transit from round ``first`` to ``last``; their number means
    after the last.
    """

    to: np.ndarray
    size: int
    first: int = 0
    last: int = 0
    kind: Literal["p2p", "gather", "exchange"] = "p2p"


@dataclass
class Traffic:
    """Bytes that one rank sends to each peer."""

    p2p: Counter[int] = field(default_factory=Counter)
    collective: Counter[int] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Return the bytes to all peers."""
        return self.p2p.total() + self.collective.total()

    def between_nodes(self, rank: int, ranks_per_node: int) -> int:
        """Return the bytes that ``rank`` sends out of its node of ``ranks_per_node`` consecutive
        ranks.
        """
        sent = self.p2p + self.collective
        return sum(
            count
            for peer, count in sent.items()
            if peer // ranks_per_node != rank // ranks_per_node
        )


@dataclass(frozen=True)
class Cost:
    """Cost of one attention for one rank: (query, key) pairs per round, bytes sent, and what the
    backward moves.
    """

    pairs: tuple[int, ...]
    forward: Traffic
    backward: Traffic
    backward_moves: Moves


class Sizes(NamedTuple):
    """Sizes after the exchange of heads: q ``[batch, tokens, heads, head_dim]``, k and v with
    ``kv_heads``.

    In linear attention v and out may have width ``value_dim`` instead.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    element_size: int
    value_dim: int | None = None
    stages: int = 1
    """Stages in which heads are exchanged; KV goes round once for each stage that attends to it."""

    @property
    def kv_passes(self) -> int:
        """Return the number of stages that attend with the same KV heads."""
        return self.stages // gcd(self.stages, self.kv_heads)

    @property
    def stage(self) -> "Sizes":
        """Return the sizes of one stage."""
        turns = gcd(self.stages, self.kv_heads)
        return self._replace(
            heads=self.heads // self.stages, kv_heads=self.kv_heads // turns, stages=1
        )

    @property
    def values(self) -> int:
        """Return the width of v and out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def wide(self) -> int:
        """Return the bytes per element of lse, partial results and gradients in transit."""
        return max(4, self.element_size)

    def payload(self, moves: Moves) -> int:
        """Return the bytes of k and v, or of q, dout, out and lse."""
        rows = self.batch * self.tokens
        if moves == "kv":
            return 2 * rows * self.kv_passes * self.kv_heads * self.head_dim * self.element_size
        return rows * self.heads * (3 * self.head_dim * self.element_size + self.wide)

    @property
    def state(self) -> int:
        """Return the bytes of a linear-attention state or its gradient: a matrix per head, for any
        number of tokens.
        """
        return self.batch * self.heads * self.head_dim * self.values * self.wide

    def gradient(self, moves: Moves) -> int:
        """Return the bytes of dk and dv, or of dq."""
        channels = (
            2 * self.kv_passes * self.kv_heads if moves == "kv" else self.heads
        ) * self.head_dim
        return self.batch * self.tokens * channels * self.wide


def sizes(
    geometry: Geometry,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    element_size: int,
    value_dim: int | None = None,
) -> Sizes:
    """Return one rank's sizes after Ulysses splits ``heads`` and ``kv_heads``."""
    degree = geometry.ulysses_degree
    tokens = geometry.local_len * degree
    stages = geometry.options.ulysses_head_chunks
    return Sizes(
        batch,
        tokens,
        heads // degree,
        max(1, kv_heads // degree),
        head_dim,
        element_size,
        value_dim,
        stages,
    )


def messages(
    geometry: Geometry, of: Sizes, moves: Moves, *, gradients: bool, boundaries: tuple[int, ...]
) -> Iterator[Message]:
    """Yield the point-to-point messages of a forward (without gradients) or a backward."""
    for index, step in enumerate(geometry.rounds):
        for send in step.sends:
            yield Message(
                geometry.at_ranks(send.to), len(step.holds) * of.payload(moves), index, send.due - 1
            )
        if gradients and step.gradient is not None:
            home = step.gradient
            yield Message(
                geometry.at_ranks(home.to),
                len(step.holds) * of.gradient(moves),
                index + 1,
                home.due,
            )
    if geometry.method.states == "neighbour":
        for slot in range(geometry.slots):
            onward = np.arange(geometry.size)
            for way in passages(geometry.layout, boundaries, gradients):
                if way.slot == slot and way.target is not None:
                    onward[way.rank] = way.target
            yield Message(onward, of.state, 0, 0)


def collectives(
    geometry: Geometry, of: Sizes, moves: Moves | None, *, holders_join: bool = True
) -> Iterator[Message]:
    """Yield the collectives of a backward that moves KV or queries, or (None) of a forward; skip
    groups of one.

    For heads: q, k, v there and out back, or dout there and dq, dk, dv back; in stages, lse back,
    and in the backward q, k, v, out and lse there again. Without ``holders_join`` what circulates
    is not gathered first, since only the rows needed travel.
    """
    gather, exchange = partial(Message, kind="gather"), partial(Message, kind="exchange")
    heads, holders, team = geometry.head_groups, geometry.holder_groups, geometry.team_groups
    rows = of.batch * of.tokens
    channel = of.batch * geometry.local_len * of.element_size
    found = [
        exchange(
            heads, ((of.heads + of.kv_heads) * of.head_dim + of.kv_heads * of.values) * channel
        ),
        exchange(heads, of.heads * of.values * channel),
    ]
    if of.stages > 1:
        lse = exchange(heads, of.batch * geometry.local_len * of.heads * of.wide)
        found += [lse] if moves is None else [*found, lse]
    if moves is None:
        found += [
            *([gather(holders, of.payload("kv"))] if holders_join else []),
            gather(team, rows * of.heads * of.head_dim * of.element_size),  # q
            exchange(team, rows * of.heads * (of.head_dim + 1) * of.wide),  # partial out and lse
        ]
    else:
        stays: Moves = "queries" if moves == "kv" else "kv"
        for ranks, what in ((holders, moves), (team, stays))[0 if holders_join else 1 :]:
            found += [gather(ranks, of.payload(what)), exchange(ranks, of.gradient(what))]
    if geometry.method.states == "gather":
        everyone = np.broadcast_to(np.arange(geometry.size), (geometry.size, geometry.size))
        found.append(gather(everyone, geometry.slots * of.state))
    return (collective for collective in found if collective.to.shape[1] > 1)


def whole_traffic(
    geometry: Geometry, rank: int, of: Sizes, moves: Moves | None, boundaries: tuple[int, ...]
) -> Traffic:
    """Return the bytes that ``rank`` sends in a backward that moves KV or queries, or (None) in a
    forward.
    """
    sent = messages(geometry, of, moves or "kv", gradients=moves is not None, boundaries=boundaries)
    return _sum(rank, chain(sent, collectives(geometry, of, moves)))


def needed_traffic(flow: Flow, rank: int, of: Sizes, moves: Moves | None) -> Traffic:
    """Return the bytes that ``rank`` sends in a backward that moves KV or queries, or (None) in a
    forward.

    ``flow`` has the rows that travel, with these moves (in a forward, KV).
    """
    total = _sum(rank, collectives(flow.geometry, of, moves, holders_join=False))
    for parcel, size, _ in parcels(flow, rank, of, moves or "kv", gradients=moves is not None):
        if parcel.peer != rank:
            total.p2p[parcel.peer] += size
    return total


def parcels(
    flow: Flow, rank: int, of: Sizes, moves: Moves, *, gradients: bool
) -> Iterator[tuple[Parcel, int, range]]:
    """Yield what a rank sends, in bytes, and the rounds in which it is under way."""
    row, gradient_row = of.payload(moves) // of.tokens, of.gradient(moves) // of.tokens
    for parcel in flow.start(rank).sends:
        yield parcel, count(parcel.rows) * row, range(1)
    for index in range(flow.rounds):
        for parcel in flow.moves(rank, index).sends:
            yield parcel, count(parcel.rows) * row, range(index, parcel.due)
        for parcel in flow.gradients(rank, index).sends if gradients else ():
            yield parcel, count(parcel.rows) * gradient_row, range(index + 1, parcel.due + 1)


def _sum(rank: int, sent: Iterable[Message]) -> Traffic:
    total = Traffic()
    for message in sent:
        counts = total.p2p if message.kind == "p2p" else total.collective
        for peer in message.to[rank : rank + 1].ravel().tolist():
            if peer != rank:
                counts[peer] += message.size
    return total


def bytes_of_all(
    geometry: Geometry,
    of: Sizes,
    moves: Moves | None,
    ranks_per_node: int,
    boundaries: tuple[int, ...],
) -> tuple[int, int]:
    """Return the bytes of all ranks (within nodes, between nodes), in a backward, or (None) in a
    forward.
    """
    sent = messages(geometry, of, moves or "kv", gradients=moves is not None, boundaries=boundaries)
    by_peers: dict[
        int, tuple[np.ndarray, int]
    ] = {}  # a ring sends to the same ranks in every round
    for to, size, *_ in chain(sent, collectives(geometry, of, moves)):
        by_peers[id(to)] = to, by_peers.get(id(to), (to, 0))[1] + size
    inside = between = 0
    for to, size in by_peers.values():
        peers = to.reshape(geometry.size, -1)
        rank = np.arange(geometry.size)[:, None]
        beyond = int(np.count_nonzero(peers // ranks_per_node != rank // ranks_per_node))
        inside += size * (int(np.count_nonzero(peers != rank)) - beyond)
        between += size * beyond
    return inside, between


@lru_cache(maxsize=256)
def cheaper_backward(geometry: Geometry, of: Sizes) -> Moves:
    """Return what the backward moves: as in the options, or else what sends fewer bytes over all
    ranks.
    """
    if geometry.options.backward != "auto":
        return geometry.options.backward
    kv, queries = (
        sum(bytes_of_all(geometry, of, moves, geometry.size, ())) for moves in ("kv", "queries")
    )
    return "kv" if kv <= queries else "queries"
