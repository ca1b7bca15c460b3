"""Geometry: what is fixed for a run, whatever mask a micro-batch has. Built on the CPU without any process.

Who owns which tokens, and in every round whose KV a rank holds, whom it sends to and receives from. Process groups,
transport and operators are made from it alone.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.layout import Layout, padded_length, places
from parallel.context.methods.base import Hop, Method, Ranks, Send, Shape
from parallel.context.options import PlanOptions


class Transfer(NamedTuple):
    """Sent to one rank while another's arrives, which is needed in round ``due``; the number of rounds is their end."""

    send_to: int
    recv_from: int
    due: int


class Step(NamedTuple):
    """A ``Hop`` in the ranks of the group: whose KV is held, where it and its gradient go and come from."""

    holds: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    gradient: Transfer | None


@dataclass(frozen=True)
class Geometry:
    """A method over one sequence length and number of ranks; immutable.

    The method arranges *places*: groups of ``ulysses_degree`` consecutive ranks, of which the u-th deals with the u-th
    others alone, in the order that ``options.placement`` gives. ``options`` are resolved.
    """

    method: Method
    seq_len: int
    size: int
    options: PlanOptions

    @property
    def team_size(self) -> int:
        """Ranks of a team."""
        return self.options.team_size

    @property
    def ulysses_degree(self) -> int:
        """Ranks that split the heads among them."""
        return self.options.ulysses_degree

    @cached_property
    def layout(self) -> Layout:
        """Who owns which position of the padded sequence; with the heads a group exchanges tokens, as in a team."""
        name, team = self.options.layout, self.team_size * self.ulysses_degree
        padded = padded_length(name, self.seq_len, self.size, team, self.options.multiple)
        return Layout(name, padded, self.size, team)

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
        return torch.from_numpy(self.layout.positions(self.owner(rank)))

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The rounds of ``rank``, in order, without what it computes in them."""
        return _steps(self, rank)

    def team(self, rank: int) -> tuple[int, ...]:
        """The ranks whose queries ``rank`` attends for."""
        place = self.place(rank)
        return self.ranks_at(self.method.team(place, self.shape), place)

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
        per_node = min(self.options.ranks_per_node or self.size, self.size)
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
        return places(self.options.placement, self.shape.size, self.team_size)

    @cached_property
    def _first_ranks(self) -> np.ndarray:
        """The first rank at each place."""
        return np.argsort(self._places) * self.ulysses_degree

    def place(self, rank: int) -> int:
        """The place of ``rank`` in the method.

        Raises:
            ContextError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ContextError(f"rank {rank} is not among {self.size} ranks")
        return int(self._places[rank // self.ulysses_degree])

    def ranks_at(self, places: tuple[Ranks, ...], place: int) -> tuple[int, ...]:
        """All ranks at those places that ``places`` says of ``place``."""
        firsts = (int(self._first_ranks[_one(of, place)]) for of in places)
        return tuple(first + u for first in firsts for u in range(self.ulysses_degree))

    def owner(self, rank: int) -> int:
        """What the layout calls ``rank``."""
        return self.place(rank) * self.ulysses_degree + rank % self.ulysses_degree


def _one(places: Ranks, place: int) -> int:
    return int(places[place]) if isinstance(places, np.ndarray) else places


@lru_cache(maxsize=64)
def _gather_order(geometry: Geometry, ranks: tuple[int, ...], device: torch.device) -> Tensor | None:
    # kept on the device: making and copying it in every layer would cost more than the gather
    owned = [run for rank in ranks for run in geometry.layout.runs(geometry.owner(rank))]
    if owned == sorted(owned):
        return None
    ends = np.cumsum([run.length for run in owned])
    blocks = (np.arange(end - run.length, end) for run, end in sorted(zip(owned, ends, strict=True)))
    return torch.from_numpy(np.concatenate(list(blocks))).to(device)


@lru_cache(maxsize=4096)
def _steps(geometry: Geometry, rank: int) -> tuple[Step, ...]:
    place, u = geometry.place(rank), rank % geometry.ulysses_degree

    def transfer(send: Send) -> Transfer:
        sender = int(np.argmax(np.broadcast_to(send.to, geometry.shape.size) == place))
        target = _one(send.to, place)
        return Transfer(int(geometry._first_ranks[target]) + u, int(geometry._first_ranks[sender]) + u, send.due)

    found = []
    for hop in geometry.hops:
        gradient = None if hop.gradient is None else transfer(hop.gradient)
        found.append(Step(geometry.ranks_at(hop.holds, place), tuple(map(transfer, hop.sends)), gradient))
    return tuple(found)
