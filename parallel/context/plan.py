"""Plans: what each rank holds, sends and computes in every round. Built on the CPU without any process."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.layout import Layout, padded_length
from parallel.context.method import Hop, Method, Send, Shape
from parallel.context.placement import places
from parallel.context.rounds import Round, Step, Transfer
from parallel.context.tiles import Run, runs, tiles
from parallel.context.traffic import Cost, Moves, backward_traffic, cheaper_backward, forward_traffic, sizes

GRADIENT = -1


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
        return torch.tensor(self._positions(rank))

    def rounds(self, rank: int, moves: Moves = "kv") -> tuple[Round, ...]:
        """The rounds of ``rank``, in order, of a forward or of a backward that moves KV or queries."""
        return _rounds(self, rank, moves)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The rounds of ``rank`` without their tiles."""
        return _steps(self, rank)

    def team(self, rank: int) -> tuple[int, ...]:
        """The ranks whose queries ``rank`` attends for."""
        return self._ranks_at(self.method.team(self._place(rank), self.shape))

    def teammates(self, rank: int) -> tuple[int, ...]:
        """The ranks that gather their queries with ``rank``, and combine their results."""
        return self.team(rank)[rank % self.ulysses_degree :: self.ulysses_degree]

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that gather their KV with ``rank`` before the first round."""
        return self.steps(rank)[0].holds[rank % self.ulysses_degree :: self.ulysses_degree]

    def head_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that split their heads with ``rank``."""
        first = rank - rank % self.ulysses_degree
        return tuple(range(first, first + self.ulysses_degree))

    def gather_order(self, ranks: tuple[int, ...], device: torch.device) -> Tensor | None:
        """Order that sorts the joined tokens of ``ranks`` by position: int64 ``[len(ranks) * local_len]``.

        None where they ascend already.
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
    def _places(self) -> tuple[int, ...]:
        return places(self.placement, self.shape.size, self.team_size)

    @cached_property
    def _first_ranks(self) -> dict[int, int]:
        """The first rank at each place."""
        return {place: index * self.ulysses_degree for index, place in enumerate(self._places)}

    def _place(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ContextError(f"rank {rank} is not among {self.size} ranks")
        return self._places[rank // self.ulysses_degree]

    def _ranks_at(self, places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._first_ranks[place] + u for place in places for u in range(self.ulysses_degree))

    def _positions(self, rank: int) -> np.ndarray:
        return self.layout.positions(self._place(rank) * self.ulysses_degree + rank % self.ulysses_degree)

    def _joined(self, ranks: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([self._positions(rank) for rank in ranks])

    @cached_property
    def _hops(self) -> list[tuple[Hop, ...]]:
        """The rounds of every place."""
        return [tuple(self.method.hops(place, self.shape)) for place in range(self.shape.size)]

    @cached_property
    def _senders(self) -> dict[tuple[int, int, int], int]:
        """Who sends: by round, what is sent (its index, or GRADIENT) and the place that it is sent to."""
        found = {}
        for place, hops in enumerate(self._hops):
            for index, hop in enumerate(hops):
                for which, send in enumerate(hop.sends):
                    found[index, which, send.to] = place
                if hop.gradient is not None:
                    found[index, GRADIENT, hop.gradient.to] = place
        return found

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """First positions of the documents after the first. Padding is one more, so that it sees itself alone."""
        boundaries = self.documents[1:-1] if self.documents else ()
        if self.padded_len > self.seq_len:
            boundaries = (*boundaries, self.seq_len)
        return boundaries

    def _runs(self, ranks: tuple[int, ...]) -> list[Run]:
        return runs(np.sort(self._joined(ranks)), self.layout.stride, self.boundaries)


@lru_cache(maxsize=64)
def _gather_order(plan: Plan, ranks: tuple[int, ...], device: torch.device) -> Tensor | None:
    # kept on the device: sorting and copying it in every layer would cost more than the gather
    joined = plan._joined(ranks)
    if (np.diff(joined) > 0).all():
        return None
    return torch.from_numpy(np.argsort(joined, kind="stable")).to(device)


@lru_cache(maxsize=4096)
def _steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    place, u = plan._place(rank), rank % plan.ulysses_degree

    def transfer(index: int, which: int, send: Send) -> Transfer:
        sender = plan._senders[index, which, place]
        return Transfer(plan._first_ranks[send.to] + u, plan._first_ranks[sender] + u, send.due)

    found = []
    for index, hop in enumerate(plan._hops[place]):
        transfers = tuple(transfer(index, which, send) for which, send in enumerate(hop.sends))
        gradient = None if hop.gradient is None else transfer(index, GRADIENT, hop.gradient)
        found.append(Step(plan._ranks_at(hop.holds), transfers, gradient))
    return tuple(found)


@lru_cache(maxsize=4096)
def _rounds(plan: Plan, rank: int, moves: Moves) -> tuple[Round, ...]:
    team, stride = plan._runs(plan.team(rank)), plan.layout.stride
    found = []
    for step in plan.steps(rank):
        pair = (team, plan._runs(step.holds)) if moves == "kv" else (plan._runs(step.holds), team)
        computed = () if step.gradient is None else tiles(*pair, stride, plan.causal)
        found.append(Round(*step, computed))
    return tuple(found)
