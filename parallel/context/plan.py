"""Plans: what each rank holds, sends and computes in every round. Built on the CPU without any process."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.layout import Layout, padded_length
from parallel.context.methods.base import Hop, Method, Ranks, Send, Shape
from parallel.context.placement import places
from parallel.context.rounds import Round, Step, Transfer
from parallel.context.tiles import Piece, pieces, tiles
from parallel.context.traffic import Cost, Moves, backward_traffic, cheaper_backward, forward_traffic, sizes
from parallel.context.work import Sets, Work, work


@dataclass(frozen=True)
class Plan:
    """The rounds of a method for one sequence length, mask and number of ranks; immutable.

    The method arranges *places*: groups of ``ulysses_degree`` consecutive ranks, of which the u-th deals with the u-th
    others alone, in the order that ``placement`` gives.
    """

    method: Method
    seq_len: int
    size: int
    team_size: int
    causal: bool
    documents: tuple[int, ...] | None
    multiple: int = 1
    ulysses_degree: int = 1
    layout_name: str = "auto"
    placement: str = "collect_intra"
    ranks_per_node: int | None = None
    backward: Literal["auto", "kv", "queries"] = "auto"

    @cached_property
    def layout(self) -> Layout:
        """Who owns which position of the padded sequence; with the heads a group exchanges tokens, as in a team."""
        name = self.method.layout(self.causal) if self.layout_name == "auto" else self.layout_name
        team = self.team_size * self.ulysses_degree
        return Layout(name, padded_length(name, self.seq_len, self.size, team, self.multiple), self.size, team)

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
        return torch.from_numpy(self.layout.positions(self._owner(rank)))

    def rounds(self, rank: int, moves: Moves = "kv") -> tuple[Round, ...]:
        """The rounds of ``rank``, in order, of a forward or of a backward that moves KV or queries."""
        return _rounds(self, rank, moves)

    def work(self, moves: Moves = "kv") -> Work:
        """What all ranks compute in all rounds: that of ``rounds``, and hundreds of times faster than one by one."""
        return _work(self, moves)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The rounds of ``rank`` without their tiles."""
        return _steps(self, rank)

    def team(self, rank: int) -> tuple[int, ...]:
        """The ranks whose queries ``rank`` attends for."""
        place = self._place(rank)
        return self._ranks_at(self.method.team(place, self.shape), place)

    def teammates(self, rank: int) -> tuple[int, ...]:
        """The ranks that gather their queries with ``rank``, and combine their results."""
        return tuple(self.team_groups[rank].tolist())

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that gather their KV with ``rank`` before the first round."""
        return tuple(self.holder_groups[rank].tolist())

    def head_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that split their heads with ``rank``."""
        return tuple(self.head_groups[rank].tolist())

    @cached_property
    def team_groups(self) -> np.ndarray:
        """The teammates of each rank: int64 ``[size, members]``."""
        team = self.method.team(np.arange(self.shape.size), self.shape)
        return np.stack([self.at_ranks(places) for places in team], axis=1)

    @cached_property
    def holder_groups(self) -> np.ndarray:
        """The holders of each rank: int64 ``[size, members]``."""
        return np.stack([self.at_ranks(places) for places in self.hops[0].holds], axis=1)

    @cached_property
    def head_groups(self) -> np.ndarray:
        """The head group of each rank: int64 ``[size, ulysses_degree]``."""
        first = np.arange(self.size) // self.ulysses_degree * self.ulysses_degree
        return first[:, None] + np.arange(self.ulysses_degree)

    def gather_order(self, ranks: tuple[int, ...], device: torch.device) -> Tensor | None:
        """Order that brings the joined tokens of ``ranks`` into that of ``Round``: int64 ``[len(ranks) * local_len]``.

        None where they have it already.
        """
        return _gather_order(self, ranks, device)

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
        self.check_heads(heads, kv_heads)
        of = sizes(self, batch, heads, kv_heads, head_dim, element_size, value_dim)
        moves = cheaper_backward(self, of)
        pairs = tuple(step.pairs for step in self.rounds(rank))
        return Cost(pairs, forward_traffic(self, rank, of), backward_traffic(self, rank, of, moves), moves)

    def peak_activations(self, layers: int) -> int:
        """Activations ``[B, local_len, H, D]`` that live before the last layer's attention (WallFacer, equations 6, 7).

        One is kept by each layer's checkpoint and one is the output; q, k and v are as many as the team has members.
        """
        return layers + 1 + 3 * self.team_size

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Refuse head counts that ``ulysses_degree`` ranks cannot split; fewer KV heads are held by several ranks.

        Raises:
            ContextError: with the degrees that work.
        """

        def fits(degree: int) -> bool:
            return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)

        if not fits(self.ulysses_degree):
            degrees = [degree for degree in range(1, self.size + 1) if self.size % degree == 0 and fits(degree)]
            raise ContextError(
                f"ulysses_degree is {self.ulysses_degree} with {heads} query and {kv_heads} key heads on each rank; it "
                "must divide the former, and divide or be a multiple of the latter; degrees that fit "
                f"{self.size} ranks: {', '.join(map(str, degrees))}"
            )

    @cached_property
    def shape(self) -> Shape:
        """The places of the method."""
        per_node = min(self.ranks_per_node or self.size, self.size)
        return Shape(self.size // self.ulysses_degree, self.team_size, max(1, per_node // self.ulysses_degree))

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The rounds of all places at once."""
        return tuple(self.method.hops(np.arange(self.shape.size), self.shape))

    def at_ranks(self, places: Ranks) -> np.ndarray:
        """For every rank the one that is to its place what ``places`` says, among those that it shares no heads with.

        Of a method's places ``[places]`` int64 ``[size]``.
        """
        if id(places) not in self._at_ranks:
            everywhere = np.broadcast_to(places, self.shape.size)
            found = (self._first_ranks[everywhere[self._places]][:, None] + np.arange(self.ulysses_degree)).ravel()
            self._at_ranks[id(places)] = places, found
        return self._at_ranks[id(places)][1]

    @cached_property
    def _at_ranks(self) -> dict[int, tuple[Ranks, np.ndarray]]:
        """By what was asked for, which must live as long: a ring sends to the same ranks in every round."""
        return {}

    @cached_property
    def _places(self) -> np.ndarray:
        """The place of each group of ranks that share their heads."""
        return places(self.placement, self.shape.size, self.team_size)

    @cached_property
    def _first_ranks(self) -> np.ndarray:
        """The first rank at each place."""
        return np.argsort(self._places) * self.ulysses_degree

    def _place(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ContextError(f"rank {rank} is not among {self.size} ranks")
        return int(self._places[rank // self.ulysses_degree])

    def _ranks_at(self, places: tuple[Ranks, ...], place: int) -> tuple[int, ...]:
        """All ranks at those places that ``places`` says of ``place``."""
        firsts = (int(self._first_ranks[_one(of, place)]) for of in places)
        return tuple(first + u for first in firsts for u in range(self.ulysses_degree))

    def _owner(self, rank: int) -> int:
        """What the layout calls ``rank``."""
        return self._place(rank) * self.ulysses_degree + rank % self.ulysses_degree

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """First positions of the documents after the first. Padding is one more, so that it sees itself alone."""
        boundaries = self.documents[1:-1] if self.documents else ()
        if self.padded_len > self.seq_len:
            boundaries = (*boundaries, self.seq_len)
        return boundaries

    def _pieces(self, ranks: tuple[int, ...]) -> list[Piece]:
        owned = (run for rank in ranks for run in self.layout.runs(self._owner(rank)))
        return pieces(owned, self.layout.stride, self.boundaries)

    def _sets(self, places: tuple[Ranks, ...]) -> tuple[Sets, np.ndarray]:
        """The different sets of ranks that ``places`` says, known by their first, and which of them each place has."""
        firsts = np.broadcast_to(places[0], self.shape.size)
        _, where, which = np.unique(firsts, return_index=True, return_inverse=True)
        return Sets([self._pieces(self._ranks_at(places, int(place))) for place in where]), which


def _one(places: Ranks, place: int) -> int:
    return int(places[place]) if isinstance(places, np.ndarray) else places


@lru_cache(maxsize=64)
def _gather_order(plan: Plan, ranks: tuple[int, ...], device: torch.device) -> Tensor | None:
    # kept on the device: making and copying it in every layer would cost more than the gather
    owned = [run for rank in ranks for run in plan.layout.runs(plan._owner(rank))]
    if owned == sorted(owned):
        return None
    ends = np.cumsum([run.length for run in owned])
    blocks = (np.arange(end - run.length, end) for run, end in sorted(zip(owned, ends, strict=True)))
    return torch.from_numpy(np.concatenate(list(blocks))).to(device)


@lru_cache(maxsize=4096)
def _steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    place, u = plan._place(rank), rank % plan.ulysses_degree

    def transfer(send: Send) -> Transfer:
        sender = int(np.argmax(np.broadcast_to(send.to, plan.shape.size) == place))
        target = _one(send.to, place)
        return Transfer(int(plan._first_ranks[target]) + u, int(plan._first_ranks[sender]) + u, send.due)

    found = []
    for hop in plan.hops:
        gradient = None if hop.gradient is None else transfer(hop.gradient)
        found.append(Step(plan._ranks_at(hop.holds, place), tuple(map(transfer, hop.sends)), gradient))
    return tuple(found)


@lru_cache(maxsize=64)
def _work(plan: Plan, moves: Moves) -> Work:
    team, own = plan._sets(plan.method.team(np.arange(plan.shape.size), plan.shape))
    holds, first = plan._sets(plan.hops[0].holds)  # whatever is held later, somebody holds at first
    pairings = []
    for hop in plan.hops:
        held = first[np.broadcast_to(hop.holds[0], plan.shape.size)]
        pair = (own, held) if moves == "kv" else (held, own)
        pairings.append(None if hop.gradient is None else pair)
    sets = (team, holds) if moves == "kv" else (holds, team)
    return work(*sets, pairings, plan.causal, plan.layout.stride)


@lru_cache(maxsize=4096)
def _rounds(plan: Plan, rank: int, moves: Moves) -> tuple[Round, ...]:
    team, stride = plan._pieces(plan.team(rank)), plan.layout.stride
    found = []
    for step in plan.steps(rank):
        pair = (team, plan._pieces(step.holds)) if moves == "kv" else (plan._pieces(step.holds), team)
        computed = () if step.gradient is None else tiles(*pair, stride, plan.causal)
        found.append(Round(*step, computed))
    return tuple(found)
