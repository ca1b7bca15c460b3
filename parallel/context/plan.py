"""Plans: the tiles that each rank computes in every round, for one geometry and one mask.

Making a plan needs no processes.

Custom operators take no Python objects, so they take handles. An executor's handle is an integer,
which torch.compile bakes into the graph. A plan's handle is a tensor instead: the mask may change
with every micro-batch, and torch.compile would recompile for each new integer.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.blocks import Tile
from parallel.context.geometry import Geometry, PlanOptions
from parallel.context.layout import (
    BALANCED,
    ContextError,
    Layout,
    Mask,
    Reach,
    Stride,
    Window,
    mask_of,
)
from parallel.context.methods import method_of
from parallel.context.methods.base import Ranks, Round
from parallel.context.sparse.balanced import ArcLayout
from parallel.context.sparse.flow import Flow, PiecesOf
from parallel.context.sparse.schedule import RankRound, rank_schedule
from parallel.context.tiles import Piece, clipped, cut_columns, pieces, tiles
from parallel.context.traffic import (
    Cost,
    Moves,
    Sizes,
    cheaper_backward,
    needed_traffic,
    sizes,
    whole_traffic,
)
from parallel.context.workload import Block, PieceSets, Work, count_work
from runtime.tensors import Handles, kept_in_object

PLANS: Handles["Plan"] = Handles()
"""Plans in use, keyed by the handles that operators take in their place."""


@dataclass(frozen=True)
class Plan:
    """The rounds of a geometry under one mask; immutable.

    Everything expensive is computed once per plan and rank and kept in the plan itself, not in a
    global cache: packed documents make a plan per micro-batch, and its tables must be freed with
    it.
    """

    geometry: Geometry
    mask: Mask
    balanced: Mask | None = None
    """Mask whose work the ``balanced`` layout balances; None means this plan's own mask. For layers
    with a window it is the mask of the layers without one, since all layers share the layout.
    """

    @cached_property
    def layout(self) -> Layout | ArcLayout:
        """The layout: which rank owns which tokens."""
        geometry = self.geometry
        if geometry.options.layout != BALANCED:
            return geometry.layout
        mask = self.balanced or self.mask
        return ArcLayout(
            seq_len=self.padded_len,
            real=self.seq_len,
            size=self.size,
            team_size=geometry.ulysses_degree,
            cu_seqlens=mask.cu_seqlens or (0, self.seq_len),
            causal=mask.causal,
            window=mask.window,
        )

    @property
    def causal(self) -> bool:
        """True if a position sees only positions up to itself."""
        return self.mask.causal

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """Cumulative lengths of packed documents."""
        return self.mask.cu_seqlens

    @property
    def sparse(self) -> bool:
        """True if a rank receives only the rows that its queries see, instead of whole tensors."""
        geometry = self.geometry
        return (
            geometry.method.needed_only
            or geometry.options.layout == BALANCED
            or not self.mask.whole
        )

    @property
    def seq_len(self) -> int:
        """Number of tokens in the sequence, without padding."""
        return self.geometry.seq_len

    @property
    def size(self) -> int:
        """Number of ranks that share the sequence."""
        return self.geometry.size

    @property
    def padded_len(self) -> int:
        """Sequence length, rounded up to a length that the layout can divide."""
        return self.geometry.padded_len

    @property
    def local_len(self) -> int:
        """Number of positions per rank, including padding."""
        return self.geometry.local_len

    def positions(self, rank: int) -> Tensor:
        """Return the global positions of ``rank``: int64 ``[local_len]``.

        They ascend, except in slices under tensor parallelism (``Layout.positions``). Positions of
        ``seq_len`` and above are padding.
        """
        return torch.from_numpy(self.layout.positions(self.geometry.owner(rank)))

    def under(self, *, cu_seqlens: tuple[int, ...] | None, window: Window | None) -> "Plan":
        """Return the plan for the same geometry and another mask; raises as ``make_plan``."""
        return _plan(self.geometry, mask_of(self.causal, cu_seqlens, window, self.seq_len))

    def windowed(self, window: Window) -> "Plan":
        """Return this plan with a window, for layers that have one; cached."""
        return self if window == self.mask.window else self._windowed(window)

    @kept_in_object
    def _windowed(self, window: Window) -> "Plan":
        mask = mask_of(self.causal, self.cu_seqlens, window, self.seq_len)
        return _plan(self.geometry, mask, self.balanced or self.mask)

    @kept_in_object
    def rounds(self, rank: int, moves: Moves = "kv") -> tuple[Round, ...]:
        """Return the rounds of ``rank`` in order, for an exchange of whole tensors.

        With ``moves`` "kv" they are for a forward pass, or for a backward pass that moves KV; with
        "queries", for a backward pass that moves queries.
        """
        team = self.pieces(self.geometry.team(rank))
        stride = self.layout.stride
        rounds = []
        for step in self.geometry.rounds_of(rank):
            computed: tuple[Tile, ...] = ()
            if step.gradient is not None:
                visitors = self.pieces(step.holds)
                if moves == "kv":
                    computed = tiles(team, visitors, stride, self.mask.reach)
                else:
                    computed = tiles(visitors, team, stride, self.mask.reach)
            rounds.append(step._replace(tiles=computed))
        return tuple(rounds)

    @kept_in_object
    def schedule(self, rank: int, moves: Moves = "kv") -> tuple[RankRound, ...]:
        """Return the rounds of ``rank`` in order, for an exchange of only the needed rows."""
        return rank_schedule(self.flow(moves), rank, *self._visible, moves)

    @kept_in_object
    def flow(self, moves: Moves = "kv") -> Flow:
        """Return the routes of all rows that some query sees."""
        return Flow(self.geometry, *self._visible, moves)

    @property
    def _visible(self) -> tuple[PiecesOf, int, Reach]:
        return self.real_pieces, self.layout.stride, self.mask.reach

    @property
    def sparse_moves(self) -> Moves:
        """Operands that the backward pass of a sparse exchange sends: KV by default, or queries."""
        return "queries" if self.geometry.options.backward == "queries" else "kv"

    def backward_moves(self, dims: Sizes) -> Moves:
        """Return the operands that a backward pass sends, for tensors of these sizes."""
        return self.sparse_moves if self.sparse else cheaper_backward(self.geometry, dims)

    def work(self, moves: Moves = "kv", block: Block = (1, 1)) -> Work:
        """Count the work of all ranks in all rounds, hundreds of times faster than ``rounds``.

        Args:
            moves: the operands that travel.
            block: numbers of queries and keys of the blocks that a kernel computes whole.
        """
        return _work(self, moves, block)

    def cost(self, rank: int, **shape: int) -> Cost:
        """Compute the work and the traffic of one attention on ``rank``.

        Partial results and gradients travel in float32 (float64 for float64 inputs). A collective
        counts the bytes sent to each peer.

        Args:
            shape: ``batch``, ``heads``, ``kv_heads``, ``head_dim``; ``element_size``, the bytes of
                an element of activations; and ``value_dim``, the width of v and out in linear
                attention, if it differs from the width of q and k.
        """
        geometry = self.geometry
        geometry.check_heads(shape["heads"], shape["kv_heads"])
        dims = sizes(geometry, **shape)
        moves = self.backward_moves(dims)

        if self.sparse and not geometry.method.states:
            steps = self.schedule(rank)
            return Cost(
                pairs=tuple(sum(tile.pairs for tile in step.tiles) for step in steps),
                forward=needed_traffic(self.flow(), rank, dims, None),
                backward=needed_traffic(self.flow(moves), rank, dims, moves),
                backward_moves=moves,
            )
        return Cost(
            pairs=tuple(step.pairs for step in self.rounds(rank)),
            forward=whole_traffic(geometry, rank, dims, None, self.boundaries),
            backward=whole_traffic(geometry, rank, dims, moves, self.boundaries),
            backward_moves=moves,
        )

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Start positions of all documents except the first.

        Padding counts as a document, so that it sees only itself.
        """
        boundaries = self.cu_seqlens[1:-1] if self.cu_seqlens else ()
        if self.padded_len > self.seq_len:
            boundaries = (*boundaries, self.seq_len)
        return boundaries

    def pieces(self, ranks: tuple[int, ...]) -> list[Piece]:
        """Return the positions of ``ranks`` as pieces, cut at document boundaries."""
        layout = self.layout
        strides = (run for rank in ranks for run in layout.strides(self.geometry.owner(rank)))
        return pieces(strides, layout.stride, self.boundaries)

    @kept_in_object
    def real_pieces(self, ranks: tuple[int, ...]) -> list[Piece]:
        """Return the pieces of ``ranks`` without padding."""
        return [piece for piece in self.pieces(ranks) if piece.start < self.seq_len]

    @kept_in_object
    def slice_tiles(
        self, rank: int, first: int, end: int, columns: int | None = None
    ) -> tuple[Tile, ...]:
        """Return the tiles of queries ``first`` to ``end`` and the keys of ``rank`` up to ``end``.

        Positions are global. The keys are those of the ranks that split the heads with ``rank``, in
        ascending positions. Rows count from ``first``, columns from the first of these keys. The
        tiles begin at the first key that one of the queries sees.

        Args:
            columns: maximum number of keys in a FULL tile, since a kernel makes gradients of all
                keys of a tile; None for any number.
        """
        document = bisect_right(self.boundaries, first)
        low = self.boundaries[document - 1] if document else 0
        behind, _ = self.mask.reach
        if behind is not None:
            low = max(low, first - behind)
        queries = pieces([Stride(first, end - first)], 1, self.boundaries)
        keys = clipped(self._place_pieces(self.geometry.place(rank)), low, end)
        whole = tiles(queries, keys, 1, self.mask.reach)
        return whole if columns is None else cut_columns(whole, columns)

    @kept_in_object
    def _place_pieces(self, place: int) -> list[Piece]:
        """Return the pieces of all ranks of a place, padding included."""
        return self.pieces(self.geometry.ranks_at((place,), place))

    def piece_sets(self, peers: tuple[Ranks, ...]) -> tuple[PieceSets, np.ndarray]:
        """Return the distinct sets among the pieces of each place's peers.

        Also return the index of each place's set, int64 ``[places]``. Two places with the same
        first peer have the same set.
        """
        first_peers = np.broadcast_to(peers[0], self.geometry.shape.size)
        _, examples, set_index = np.unique(first_peers, return_index=True, return_inverse=True)
        members = [self.pieces(self.geometry.ranks_at(peers, int(place))) for place in examples]
        return PieceSets(members), set_index


@dataclass(frozen=True)
class PlanHandle:
    """A micro-batch's plan, as a model passes it from layer to layer.

    Not a tensor itself: data parallelism moves and casts the tensors that it finds among a layer's
    arguments, and would send a bare handle to the GPU or round it.
    """

    tensor: Tensor
    """Handle of a plan in ``PLANS``, int64 on the CPU."""


_geometry = lru_cache(maxsize=1024)(Geometry)
_whole = lru_cache(maxsize=1024)(Plan)
# Every micro-batch of packed documents has its own plan, which the handle keeps alive. So a large
# cache would only hold the tables of batches long past.
_packed = lru_cache(maxsize=16)(Plan)


def _plan(geometry: Geometry, mask: Mask, balanced: Mask | None = None) -> Plan:
    return (_whole if mask.cu_seqlens is None else _packed)(geometry, mask, balanced)


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
        seq_len: number of tokens; padding follows, up to a length that the layout can divide.
        size: number of ranks that share the sequence.
        causal: True if position p sees its document only up to p; False if it sees all of it.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len).
        window: numbers of keys (left, right) that a query sees besides its own, -1 for all; right
            is 0 or -1 if causal.
        options: the fields of ``PlanOptions``.

    Raises:
        ContextError: the method is unknown or does not support the combination; the message has
            the reason and the fix.
    """
    method_data = method_of(method)
    resolved = PlanOptions(**options).resolved(method_data, seq_len, size, causal)
    mask = mask_of(causal, documents, window, seq_len)
    plan = _plan(_geometry(method_data, seq_len, size, resolved), mask)
    method_data.check(plan.geometry.shape, causal)
    return plan


@lru_cache(maxsize=64)
def _work(plan: Plan, moves: Moves, block: Block) -> Work:
    geometry = plan.geometry
    num_places = geometry.shape.size
    team_peers = geometry.method.team(np.arange(num_places), geometry.shape)
    team_sets, team_index = plan.piece_sets(team_peers)
    # The sets of the first round are enough: a set that a place holds later is some place's first.
    held_sets, first_index = plan.piece_sets(geometry.rounds[0].holds)

    pairings: list[tuple[np.ndarray, np.ndarray] | None] = []
    for step in geometry.rounds:
        if step.gradient is None:
            pairings.append(None)
            continue
        held_index = first_index[np.broadcast_to(step.holds[0], num_places)]
        if moves == "kv":
            pairings.append((team_index, held_index))
        else:
            pairings.append((held_index, team_index))

    stride = plan.layout.stride
    if moves == "kv":
        return count_work(team_sets, held_sets, pairings, stride, plan.mask.reach, block)
    return count_work(held_sets, team_sets, pairings, stride, plan.mask.reach, block)


def plan_of(handle: Tensor, geometry: Geometry) -> Plan:
    """Return the plan of a handle, after checking that it fits ``geometry``.

    Raises ContextError if its ranks, length, method or layout differ from those of ``geometry``.
    """
    plan = PLANS[handle]
    actual = plan.geometry
    if actual is geometry or actual == geometry:
        return plan
    # In one process every method computes the same attention, so only the length must agree.
    if actual.size == geometry.size == 1 and actual.padded_len == geometry.padded_len:
        return plan
    raise ContextError(
        f"mask is for {actual.method.name} over {actual.seq_len} tokens on {actual.size} ranks, "
        f"but this attention is {geometry.method.name} over {geometry.seq_len} tokens on "
        f"{geometry.size} ranks; pass a handle from under(...) of the same object"
    )
