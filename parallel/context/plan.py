"""Plans: what each rank holds, sends and computes in every round. Built on the CPU without any process."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.layout import Layout, padded_length
from parallel.context.method import Hop, Method
from parallel.context.registry import method_of
from parallel.context.tiles import Run, Tile, runs, tiles


@dataclass(frozen=True)
class Round:
    """One round of one rank.

    ``holds`` are the ranks whose KV is at hand, joined in ascending order of position; what is held is sent to
    ``send_to`` while the next round's KV arrives from ``recv_from`` (None in the last round); ``tiles`` are slices of
    (this rank's queries, held keys).
    """

    holds: tuple[int, ...]
    send_to: int | None
    recv_from: int | None
    tiles: tuple[Tile, ...]

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs computed in this round."""
        return sum(tile.pairs for tile in self.tiles)


@dataclass(frozen=True)
class Cost:
    """What one attention costs one rank: (query, key) pairs per round, bytes sent to each peer."""

    pairs: tuple[int, ...]
    forward_bytes: dict[int, int]
    backward_bytes: dict[int, int]


@dataclass(frozen=True)
class Plan:
    """The rounds of a method for one sequence length, mask and number of ranks; immutable."""

    method: Method
    seq_len: int
    size: int
    team_size: int
    causal: bool
    documents: tuple[int, ...] | None
    multiple: int = 1

    @cached_property
    def layout(self) -> Layout:
        """Who owns which position of the padded sequence."""
        name = self.method.layout(self.causal)
        padded = padded_length(name, self.seq_len, self.size, self.team_size, self.multiple)
        return Layout(name, padded, self.size, self.team_size)

    @property
    def padded_len(self) -> int:
        """Length of the sequence once padded to what the layout can divide."""
        return self.layout.seq_len

    @property
    def local_len(self) -> int:
        """Positions of each rank, padding included."""
        return self.padded_len // self.size

    def positions(self, rank: int) -> Tensor:
        """Ascending global positions of ``rank``: int64 ``[local_len]``; those from seq_len on are padding."""
        return torch.tensor(self.layout.positions(rank))

    def rounds(self, rank: int) -> tuple[Round, ...]:
        """The rounds of ``rank``, in order."""
        return _rounds(self, rank)

    def hops(self, rank: int) -> tuple[Hop, ...]:
        """The rounds of ``rank`` without their tiles: who holds what, and where it goes."""
        return tuple(self.method.hops(rank, self.size))

    def homecoming(self, rank: int) -> tuple[int, int]:
        """After the last round: the owner of the KV held by ``rank``, and the rank that holds the KV of ``rank``."""
        last_holds = [self.hops(other)[-1].holds for other in range(self.size)]
        return last_holds[rank][0], last_holds.index((rank,))

    def gather_order(self, ranks: tuple[int, ...], device: torch.device) -> Tensor:
        """Order that brings the joined KV of ``ranks`` into ascending positions: int64 ``[len(ranks) * local_len]``."""
        return _gather_order(self, ranks, device)

    def cost(self, rank: int, *, batch: int, kv_heads: int, head_dim: int, element_size: int) -> Cost:
        """Work and traffic of one attention on ``rank``; ``element_size`` in bytes, of the activations.

        The backward sends KV again and its gradient in float32; a gather counts what each peer is sent of it.
        """
        elements = 2 * batch * self.local_len * kv_heads * head_dim
        forward: dict[int, int] = {}
        backward: dict[int, int] = {}
        for hop in self.hops(rank):
            peers = [hop.send_to] if hop.send_to is not None else [peer for peer in hop.holds if len(hop.holds) > 1]
            for peer in peers:
                if peer != rank:
                    forward[peer] = forward.get(peer, 0) + elements * element_size
                    backward[peer] = backward.get(peer, 0) + elements * (element_size + 4)
        if self.size > 1 and len(self.hops(rank)[-1].holds) == 1:
            home, _ = self.homecoming(rank)
            backward[home] = backward.get(home, 0) + elements * 4
        return Cost(tuple(r.pairs for r in self.rounds(rank)), forward, backward)

    def _joined(self, ranks: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([self.layout.positions(rank) for rank in ranks])

    @cached_property
    def _boundaries(self) -> tuple[int, ...]:
        """First positions of the documents after the first. Padding is one more, so that it sees itself alone."""
        boundaries = self.documents[1:-1] if self.documents else ()
        if self.padded_len > self.seq_len:
            boundaries = (*boundaries, self.seq_len)
        return boundaries

    def _runs(self, ranks: tuple[int, ...]) -> list[Run]:
        return runs(np.sort(self._joined(ranks)), self.layout.stride, self._boundaries)


def make_plan(
    method: str,
    *,
    seq_len: int,
    size: int,
    team_size: int = 1,
    causal: bool = True,
    documents: tuple[int, ...] | None = None,
    multiple: int = 1,
) -> Plan:
    """The plan of a method; no processes needed, and cached.

    Args:
        method: a name in ``METHODS``.
        seq_len: tokens of the sequence; lengths that do not divide are padded at the end.
        size: ranks that share the sequence.
        team_size: ranks of a team, for the methods that have teams.
        causal: position p sees positions up to p (of its own document); otherwise all of its document.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len).
        multiple: pad until each rank's number of positions is a multiple of this, which tensor parallelism needs.

    Raises:
        ContextError: unknown method, or a combination that the method refuses, with the reason and the fix.
    """
    if seq_len < 1:
        raise ContextError(f"seq_len is {seq_len}; it must be 1 or more")
    chosen = method_of(method)
    chosen.check(size, team_size, causal)
    if documents is not None:
        documents = tuple(int(x) for x in documents)
        ascending = all(a < b for a, b in pairwise(documents))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len or not ascending:
            raise ContextError(f"documents must ascend from 0 to seq_len {seq_len} and are {documents}")
    return _make_plan(chosen, seq_len, size, team_size, causal, documents, multiple)


@lru_cache(maxsize=1024)
def _make_plan(
    method: Method,
    seq_len: int,
    size: int,
    team_size: int,
    causal: bool,
    documents: tuple[int, ...] | None,
    multiple: int,
) -> Plan:
    return Plan(method, seq_len, size, team_size, causal, documents, multiple)


@lru_cache(maxsize=64)
def _gather_order(plan: Plan, ranks: tuple[int, ...], device: torch.device) -> Tensor:
    # kept on the device: sorting and copying it in every layer would cost more than the gather
    return torch.from_numpy(np.argsort(plan._joined(ranks), kind="stable")).to(device)


@lru_cache(maxsize=4096)
def _rounds(plan: Plan, rank: int) -> tuple[Round, ...]:
    q_runs, stride = plan._runs((rank,)), plan.layout.stride
    return tuple(Round(*hop, tiles(q_runs, plan._runs(hop.holds), stride, plan.causal)) for hop in plan.hops(rank))
