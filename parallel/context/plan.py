"""Plans: what each rank computes in every round, for a geometry under one mask.

Making a plan needs no processes. A custom operator takes no Python object, so it takes handles.
That of an executor is an integer. That of a plan is a tensor: the mask may change with every
micro-batch, and torch.compile would recompile for each new integer.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.context.geometry import Geometry, PlanOptions
from parallel.context.layout import BALANCED, ContextError, Layout, Mask, Reach, Window, mask_of
from parallel.context.methods import method_of
from parallel.context.methods.base import Ranks, Round
from parallel.context.sparse.balanced import ArcLayout
from parallel.context.sparse.flow import Flow, PiecesOf, RankRound, rank_schedule
from parallel.context.tiles import Piece, Sets, Work, pieces, tiles, work
from parallel.context.traffic import (
    Cost,
    Moves,
    Sizes,
    cheaper_backward,
    needed_traffic,
    sizes,
    whole_traffic,
)
from runtime.tensors import Handles, kept_in_object

PLANS: Handles["Plan"] = Handles()
"""Plans by handle."""


@dataclass(frozen=True)
class Plan:
    """The rounds of a geometry under one mask; immutable."""

    geometry: Geometry
    mask: Mask
    balanced: Mask | None = None
    """The mask that the layout ``balanced`` balances, if not this one: that of the layers without a
    window.
    """

    @cached_property
    def layout(self) -> Layout | ArcLayout:
        """Return who owns which tokens."""
        geometry, mask = self.geometry, self.balanced or self.mask
        if geometry.options.layout != BALANCED:
            return geometry.layout
        documents = mask.documents or (0, self.seq_len)
        sizes = self.padded_len, self.seq_len, self.size, geometry.ulysses_degree
        return ArcLayout(*sizes, documents, mask.causal, mask.window)

    @property
    def causal(self) -> bool:
        """Return whether a position sees those up to itself only."""
        return self.mask.causal

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Return the cumulative lengths of packed documents."""
        return self.mask.documents

    @property
    def sparse(self) -> bool:
        """Return whether only the rows that a query sees travel."""
        geometry = self.geometry
        return (
            geometry.method.needed_only
            or geometry.options.layout == BALANCED
            or not self.mask.whole
        )

    @property
    def seq_len(self) -> int:
        """Return the number of tokens in the sequence."""
        return self.geometry.seq_len

    @property
    def size(self) -> int:
        """Return the number of ranks that share the sequence."""
        return self.geometry.size

    @property
    def padded_len(self) -> int:
        """Return the sequence length padded to what the layout can divide."""
        return self.geometry.padded_len

    @property
    def local_len(self) -> int:
        """Return the number of positions per rank, padding included."""
        return self.geometry.local_len

    def positions(self, rank: int) -> Tensor:
        """Return ascending global positions of ``rank``: int64 ``[local_len]``; seq_len and above
        are padding.
        """
        return torch.from_numpy(self.layout.positions(self.geometry.owner(rank)))

    def under(self, *, documents: tuple[int, ...] | None, window: Window | None) -> "Plan":
        """Return the plan of the same geometry under another mask. Raises as ``make_plan``."""
        return _plan(self.geometry, mask_of(self.causal, documents, window, self.seq_len))

    def windowed(self, window: Window) -> "Plan":
        """Return the plan with a window, for the layers that have one; made once."""
        return self if window == self.mask.window else self._windowed(window)

    @kept_in_object
    def _windowed(self, window: Window) -> "Plan":
        mask = mask_of(self.causal, self.documents, window, self.seq_len)
        return _plan(self.geometry, mask, self.balanced or self.mask)

    @kept_in_object
    def rounds(self, rank: int, moves: Moves = "kv") -> tuple[Round, ...]:
        """Return the rounds of ``rank``, in order, of a forward or of a backward that moves KV or
        queries.
        """
        team, found = self.pieces(self.geometry.team(rank)), []
        for step in self.geometry.rounds_of(rank):
            pair = (
                (team, self.pieces(step.holds))
                if moves == "kv"
                else (self.pieces(step.holds), team)
            )
            computed = (
                () if step.gradient is None else tiles(*pair, self.layout.stride, self.mask.reach)
            )
            found.append(step._replace(tiles=computed))
        return tuple(found)

    @kept_in_object
    def schedule(self, rank: int, moves: Moves = "kv") -> tuple[RankRound, ...]:
        """Return what ``rank`` sends, receives and computes where only the rows that a query sees
        travel.
        """
        return rank_schedule(self.flow(moves), rank, *self._visible, moves)

    @kept_in_object
    def flow(self, moves: Moves = "kv") -> Flow:
        """Return the routes of all rows that a query sees."""
        return Flow(self.geometry, *self._visible, moves)

    @property
    def _visible(self) -> tuple[PiecesOf, int, Reach]:
        return self.real_pieces, self.layout.stride, self.mask.reach

    @property
    def sparse_moves(self) -> Moves:
        """Return what a backward moves where only the rows that a query sees travel: KV, unless
        told otherwise.
        """
        return "queries" if self.geometry.options.backward == "queries" else "kv"

    def backward_moves(self, of: Sizes) -> Moves:
        """Return what a backward with tensors of these sizes moves."""
        return self.sparse_moves if self.sparse else cheaper_backward(self.geometry, of)

    def work(self, moves: Moves = "kv") -> Work:
        """Return the work of all ranks in all rounds: as in ``rounds``, but hundreds of times
        faster.
        """
        return _work(self, moves)

    def cost(self, rank: int, **shape: int) -> Cost:
        """Compute work and traffic of one attention on ``rank``.

        Partial results and gradients travel in float32 (float64 for float64). A collective counts
        the bytes sent to each peer.

        Args:
            shape: ``batch``, ``heads``, ``kv_heads``, ``head_dim``; ``element_size``, that of
                activations, in bytes; and ``value_dim``, the width of v and out in linear
                attention, if it differs from that of q and k.
        """
        geometry, boundaries = self.geometry, self.boundaries
        geometry.check_heads(shape["heads"], shape["kv_heads"])
        of = sizes(geometry, **shape)
        moves = self.backward_moves(of)
        if self.sparse and not geometry.method.states:
            pairs = tuple(sum(tile.pairs for tile in step.tiles) for step in self.schedule(rank))
            forward = needed_traffic(self.flow(), rank, of, None)
            return Cost(pairs, forward, needed_traffic(self.flow(moves), rank, of, moves), moves)
        return Cost(
            tuple(step.pairs for step in self.rounds(rank)),
            whole_traffic(geometry, rank, of, None, boundaries),
            whole_traffic(geometry, rank, of, moves, boundaries),
            moves,
        )

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Return the start of every document but the first. Padding is a document, so that it sees
        only itself.
        """
        boundaries = self.documents[1:-1] if self.documents else ()
        if self.padded_len > self.seq_len:
            boundaries = (*boundaries, self.seq_len)
        return boundaries

    def pieces(self, ranks: tuple[int, ...]) -> list[Piece]:
        """Return the positions of ``ranks``, joined and cut at documents."""
        layout = self.layout
        owned = (run for rank in ranks for run in layout.strides(self.geometry.owner(rank)))
        return pieces(owned, layout.stride, self.boundaries)

    @kept_in_object
    def real_pieces(self, ranks: tuple[int, ...]) -> list[Piece]:
        """Return the pieces without padding, which nothing sees."""
        return [piece for piece in self.pieces(ranks) if piece.start < self.seq_len]

    def sets(self, places: tuple[Ranks, ...]) -> tuple[Sets, np.ndarray]:
        """Return the distinct sets of peers in ``places``, told apart by the first peer, and each
        place's set index.
        """
        firsts = np.broadcast_to(places[0], self.geometry.shape.size)
        _, where, which = np.unique(firsts, return_index=True, return_inverse=True)
        return Sets(
            [self.pieces(self.geometry.ranks_at(places, int(place))) for place in where]
        ), which


@dataclass(frozen=True)
class PlanHandle:
    """A micro-batch's plan, as a model hands it from layer to layer.

    Not a tensor itself: data parallelism moves and casts the tensors that it finds among a layer's
    arguments.
    """

    tensor: Tensor
    """A handle in ``PLANS``, int64 on the CPU."""


_geometry = lru_cache(maxsize=1024)(Geometry)
_whole = lru_cache(maxsize=1024)(Plan)
_packed = lru_cache(maxsize=16)(
    Plan
)  # every micro-batch has one of its own, which its handle keeps alive


def _plan(geometry: Geometry, mask: Mask, balanced: Mask | None = None) -> Plan:
    return (_whole if mask.documents is None else _packed)(geometry, mask, balanced)


def make_plan(
    method: str,
    *,
    seq_len: int,
    size: int,
    causal: bool = True,
    documents: tuple[int, ...] | None = None,
    window: Window | None = None,
    **options: Any,
) -> Plan:
    """Make the plan of a method. Needs no processes; cached.

    Args:
        method: a name in ``METHODS``.
        seq_len: tokens of the sequence; padded at the end to what the layout can divide.
        size: ranks that share the sequence.
        causal: position p sees positions up to p in its document; otherwise all of its document.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len).
        window: keys (left, right) that a query sees besides its own, -1 for all; right is 0 if
            causal.
        options: the fields of ``PlanOptions``.

    Raises:
        ContextError: unknown method, or a combination it does not support, with the reason and the
            fix.
    """
    chosen = method_of(method)
    resolved = PlanOptions(**options).resolved(chosen, seq_len, size, causal)
    plan = _plan(
        _geometry(chosen, seq_len, size, resolved), mask_of(causal, documents, window, seq_len)
    )
    chosen.check(plan.geometry.shape, causal)
    return plan


@lru_cache(maxsize=64)
def _work(plan: Plan, moves: Moves) -> Work:
    geometry = plan.geometry
    team, own = plan.sets(geometry.method.team(np.arange(geometry.shape.size), geometry.shape))
    holds, first = plan.sets(
        geometry.rounds[0].holds
    )  # every set held later is held by some place at first
    pairings = []
    for step in geometry.rounds:
        held = first[np.broadcast_to(step.holds[0], geometry.shape.size)]
        pair = (own, held) if moves == "kv" else (held, own)
        pairings.append(None if step.gradient is None else pair)
    sets = (team, holds) if moves == "kv" else (holds, team)
    return work(*sets, pairings, plan.layout.stride, plan.mask.reach)


def plan_of(handle: Tensor, geometry: Geometry) -> Plan:
    """Return a plan by its handle.

    Raises ContextError: it is of other ranks, another length, method or layout than ``geometry``.
    """
    plan = PLANS[handle]
    own = plan.geometry
    alone = own.size == geometry.size == 1 and own.padded_len == geometry.padded_len
    if own is not geometry and own != geometry and not alone:
        raise ContextError(
            f"mask is of {own.method.name} over {own.seq_len} tokens on {own.size} ranks, and this attention is "
            f"{geometry.method.name} over {geometry.seq_len} on {geometry.size}; pass a handle from under(...) of "
            "the same object"
        )
    return plan
