"""Plans: a geometry under one mask, and so what each rank computes in every round. Needs no process."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.geometry import Geometry, Transfer
from parallel.context.methods.base import Ranks
from parallel.context.methods.registry import method_of
from parallel.context.options import PlanOptions
from parallel.context.tiles import Piece, Tile, pieces, tiles
from parallel.context.traffic import Cost, Moves, backward_traffic, cheaper_backward, forward_traffic, sizes
from parallel.context.work import Sets, Work, work
from runtime.handles import Handles

PLANS: Handles["Plan"] = Handles()
"""By the handles with which the operators of an attention take a plan, since it may change with every call."""


@dataclass(frozen=True)
class Round:
    """One round of one rank: a ``Step``, and tiles that are slices of (this rank's queries, held keys).

    This rank's queries are those of its team, joined in ascending order of position, as the keys are of ``holds``
    (where several ranks hold every n-th position each, in the order of their first ones). In a backward that moves
    queries it is they that are held, and the keys are the team's.
    """

    holds: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    gradient: Transfer | None
    tiles: tuple[Tile, ...]

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs computed in this round."""
        return sum(tile.pairs for tile in self.tiles)


@dataclass(frozen=True)
class Plan:
    """The rounds of a geometry under one mask; immutable."""

    geometry: Geometry
    causal: bool
    documents: tuple[int, ...] | None

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return self.geometry.seq_len

    @property
    def size(self) -> int:
        """Ranks that share the sequence."""
        return self.geometry.size

    @property
    def padded_len(self) -> int:
        """Length of the sequence once padded to what the layout can divide."""
        return self.geometry.padded_len

    @property
    def local_len(self) -> int:
        """Positions of each rank, padding included."""
        return self.geometry.local_len

    def positions(self, rank: int) -> Tensor:
        """Ascending global positions of ``rank``: int64 ``[local_len]``; those from seq_len on are padding."""
        return self.geometry.positions(rank)

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """As of ``Geometry``."""
        self.geometry.check_heads(heads, kv_heads)

    def under(self, documents: tuple[int, ...] | None) -> "Plan":
        """The plan of the same geometry for other documents.

        Raises:
            ContextError: boundaries that do not ascend from 0 to the sequence's length.
        """
        return _plan(self.geometry, self.causal, _checked(documents, self.seq_len))

    def rounds(self, rank: int, moves: Moves = "kv") -> tuple[Round, ...]:
        """The rounds of ``rank``, in order, of a forward or of a backward that moves KV or queries."""
        return _rounds(self, rank, moves)

    def work(self, moves: Moves = "kv") -> Work:
        """What all ranks compute in all rounds: that of ``rounds``, and hundreds of times faster than one by one."""
        return _work(self, moves)

    def cost(
        self,
        rank: int,
        *,
        batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        element_size: int,
        value_dim: int | None = None,
    ) -> Cost:
        """Work and traffic of one attention on ``rank``; ``element_size`` in bytes, of the activations.

        ``value_dim`` is the width of v and out, where linear attention has another one than that of q and k.

        Partial results and gradients travel in float32 (float64 for float64). A collective counts what each peer is
        sent of it.
        """
        geometry, boundaries = self.geometry, self.boundaries
        geometry.check_heads(heads, kv_heads)
        of = sizes(geometry, batch, heads, kv_heads, head_dim, element_size, value_dim)
        moves = cheaper_backward(geometry, of)
        return Cost(
            tuple(step.pairs for step in self.rounds(rank)),
            forward_traffic(geometry, rank, of, boundaries),
            backward_traffic(geometry, rank, of, moves, boundaries),
            moves,
        )

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """First positions of the documents after the first. Padding is one more, so that it sees itself alone."""
        boundaries = self.documents[1:-1] if self.documents else ()
        if self.padded_len > self.seq_len:
            boundaries = (*boundaries, self.seq_len)
        return boundaries

    def pieces(self, ranks: tuple[int, ...]) -> list[Piece]:
        """The positions of ``ranks``, joined and cut at documents."""
        layout = self.geometry.layout
        owned = (run for rank in ranks for run in layout.runs(self.geometry.owner(rank)))
        return pieces(owned, layout.stride, self.boundaries)

    def sets(self, places: tuple[Ranks, ...]) -> tuple[Sets, np.ndarray]:
        """The different sets of ranks that ``places`` says, known by their first, and which of them each place has."""
        firsts = np.broadcast_to(places[0], self.geometry.shape.size)
        _, where, which = np.unique(firsts, return_index=True, return_inverse=True)
        return Sets([self.pieces(self.geometry.ranks_at(places, int(place))) for place in where]), which


_geometry = lru_cache(maxsize=1024)(Geometry)
_plan = lru_cache(maxsize=1024)(Plan)


def make_plan(
    method: str,
    *,
    seq_len: int,
    size: int,
    causal: bool = True,
    documents: tuple[int, ...] | None = None,
    **options: Any,
) -> Plan:
    """The plan of a method; no processes needed, and cached.

    Args:
        method: a name in ``METHODS``.
        seq_len: tokens of the sequence; lengths that do not divide are padded at the end.
        size: ranks that share the sequence.
        causal: position p sees positions up to p (of its own document); otherwise all of its document.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len).
        options: the fields of ``PlanOptions``.

    Raises:
        ContextError: unknown method, or a combination that the method refuses, with the reason and the fix.
    """
    chosen = method_of(method)
    resolved = PlanOptions(**options).resolved(chosen, seq_len, size, causal)
    plan = _plan(_geometry(chosen, seq_len, size, resolved), causal, _checked(documents, seq_len))
    chosen.check(plan.geometry.shape, causal)
    return plan


def _checked(documents: tuple[int, ...] | None, seq_len: int) -> tuple[int, ...] | None:
    """Boundaries as integers, so that plans of the same ones are one."""
    if documents is not None:
        documents = tuple(int(x) for x in documents)
        ascending = all(a < b for a, b in pairwise(documents))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len or not ascending:
            raise ContextError(f"documents must ascend from 0 to seq_len {seq_len} and are {documents}")
    return documents


@lru_cache(maxsize=64)
def _work(plan: Plan, moves: Moves) -> Work:
    geometry = plan.geometry
    team, own = plan.sets(geometry.method.team(np.arange(geometry.shape.size), geometry.shape))
    holds, first = plan.sets(geometry.hops[0].holds)  # whatever is held later, somebody holds at first
    pairings = []
    for hop in geometry.hops:
        held = first[np.broadcast_to(hop.holds[0], geometry.shape.size)]
        pair = (own, held) if moves == "kv" else (held, own)
        pairings.append(None if hop.gradient is None else pair)
    sets = (team, holds) if moves == "kv" else (holds, team)
    return work(*sets, pairings, plan.causal, geometry.layout.stride)


@lru_cache(maxsize=4096)
def _rounds(plan: Plan, rank: int, moves: Moves) -> tuple[Round, ...]:
    team, stride = plan.pieces(plan.geometry.team(rank)), plan.geometry.layout.stride
    found = []
    for step in plan.geometry.steps(rank):
        pair = (team, plan.pieces(step.holds)) if moves == "kv" else (plan.pieces(step.holds), team)
        computed = () if step.gradient is None else tiles(*pair, stride, plan.causal)
        found.append(Round(*step, computed))
    return tuple(found)
