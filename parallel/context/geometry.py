"""Geometry: the layout, rounds and groups of a method, the same under any mask.

It defines which rank owns which tokens and, for each round, which KV a rank holds, to whom it sends
KV and from whom it receives KV. Process groups, transport and operators depend only on the
geometry, which is built on the CPU, without processes.

Geometry and plan are separate because changing them costs differently. A new geometry means new
process groups, and creating them is a collective that takes seconds on many nodes; a new mask comes
with every micro-batch of packed documents. So nothing here may look at documents.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from parallel.context.layout import (
    BALANCED,
    PLACEMENTS,
    ContextError,
    Layout,
    can_split,
    check_slices,
    padded_length,
    place_of_ranks,
)
from parallel.context.methods.base import Method, Ranks, Round, Send, Shape
from runtime.errors import divisors
from runtime.tensors import kept_in_object

Moves = Literal["kv", "queries"]
"""Operands that a backward pass circulates: KV with its gradient, or queries (q, dout, out, lse)
with dq.
"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Keywords of ``make_plan`` and ``context_parallel`` that do not depend on the mask."""

    team_size: int = 1
    """Number of ranks per team, for methods with teams."""
    ulysses_degree: int = 1
    """Number of neighbouring ranks that split the heads; the method treats them as one rank."""
    ulysses_head_chunks: int = 1
    """Number of stages, each of which exchanges and attends with a part of the heads."""
    multiple: int = 1
    """Each rank's number of positions is padded to a multiple of this, for tensor parallelism."""
    layout: str = "auto"
    """Layout, for methods that support several; ``auto`` balances the work under the mask."""
    placement: str = "collect_intra"
    """Ranks that are neighbours, so that they share a node: the members of a team
    (``collect_intra``) or of a ring (``p2p_intra``).
    """
    ranks_per_node: int | None = None
    """Number of consecutive ranks per node, for ``double_ring`` and ``exchange``; None means that
    all ranks share one node."""
    backward: Literal["auto", "kv", "queries"] = "auto"
    """Operands that the backward pass circulates; ``auto`` takes those with fewer bytes."""
    slice_len: int = 0
    """Number of each rank's tokens in a slice, if layers take the sequence slice by slice; 0 for
    the whole sequence at once."""
    delta_rule_schedule: Literal["auto", "chain", "tree"] = "auto"
    """Schedule by which ranks pass on the states of a delta rule (``linear/segments.py``)."""

    def resolved(self, method: Method, seq_len: int, size: int, causal: bool) -> "PlanOptions":
        """Return the options with the layout and, if the method sets it, the degree resolved.

        Raises:
            ContextError: the method does not support the combination; the message has the reason
                and the fix.
        """
        self._check_minimum(seq_len, size)
        degree = size if method.splits_heads and self.ulysses_degree == 1 else self.ulysses_degree
        if size % degree:
            raise ContextError(
                f"ulysses_degree is {degree}, but it must divide the context-parallel size {size}; "
                f"use one of {', '.join(map(str, divisors(size)))}"
            )
        if degree == 1 and self.ulysses_head_chunks > 1:
            raise ContextError(
                f"ulysses_head_chunks is {self.ulysses_head_chunks}, but no ranks exchange heads; "
                "leave out ulysses_head_chunks, or use a ulysses_degree of 2 or more"
            )
        if method.nodes and self.ranks_per_node and min(self.ranks_per_node, size) % degree:
            raise ContextError(
                f"context_parallel_ranks_per_node is {self.ranks_per_node}, but it must be a "
                f"multiple of ulysses_degree {degree}, since ranks that split heads share a node; "
                "use a ulysses_degree that divides the number of ranks per node"
            )
        if method.states:
            self._check_state_method(method.name)
        self._check_choices(method)
        layout = method.layout(causal)
        backward = self.backward
        if self.slice_len:
            in_blocks = size == degree or self.layout == "contiguous"
            if in_blocks and "contiguous" in method.layouts:
                layout = "contiguous"
            check_slices(self.slice_len, causal, self.layout, layout, backward)
            backward = "kv"
        elif self.layout != "auto":
            layout = self.layout
        return replace(self, ulysses_degree=degree, layout=layout, backward=backward)

    def _check_minimum(self, seq_len: int, size: int) -> None:
        """Check that every count is at least 1."""
        counts = {
            "seq_len": seq_len,
            "context_parallel_size": size,
            "context_parallel_team_size": self.team_size,
            "multiple": self.multiple,
            "ulysses_degree": self.ulysses_degree,
            "ulysses_head_chunks": self.ulysses_head_chunks,
        }
        if self.ranks_per_node is not None:
            counts["context_parallel_ranks_per_node"] = self.ranks_per_node
        for name, value in counts.items():
            if value < 1:
                raise ContextError(f"{name} is {value}; it must be 1 or more")

    def _check_state_method(self, method: str) -> None:
        if self.layout not in ("auto", "contiguous", "zigzag"):
            raise ContextError(
                f"context_parallel_layout is {self.layout!r}, but method {method} needs the same "
                "number of stretches of consecutive tokens on every rank, since it passes a state "
                "along them; use contiguous, zigzag or auto"
            )
        if self.ulysses_degree > 1:
            raise ContextError(
                f"ulysses_degree is {self.ulysses_degree}, but method {method} does not split "
                "heads, since the states that it sends do not grow with the sequence; use "
                "ulysses_degree 1"
            )

    def _check_choices(self, method: Method) -> None:
        layouts = ("auto", *method.layouts)
        if self.layout not in layouts:
            raise ContextError(
                f"context_parallel_layout is {self.layout!r}, but method {method.name} does not "
                f"support it; use one of {', '.join(layouts)}"
            )
        for name, value, choices in (
            ("context_parallel_placement", self.placement, PLACEMENTS),
            ("backward", self.backward, ("auto", "kv", "queries")),
            ("delta_rule_schedule", self.delta_rule_schedule, ("auto", "chain", "tree")),
        ):
            if value not in choices:
                raise ContextError(f"{name} is {value!r}; use one of {', '.join(choices)}")
        if self.placement != "collect_intra" and not method.teams:
            raise ContextError(
                f"context_parallel_placement is {self.placement}, but method {method.name} has no "
                "teams to place; use collect_intra"
            )


@dataclass(frozen=True)
class Geometry:
    """A method for one sequence length and number of ranks; immutable.

    The method arranges *places*: groups of ``ulysses_degree`` consecutive ranks, ordered by
    ``options.placement``. The u-th rank of a place exchanges only with the u-th ranks of other
    places, so a method never needs to know about Ulysses. ``options`` must be resolved.
    """

    method: Method
    seq_len: int
    size: int
    options: PlanOptions

    @property
    def team_size(self) -> int:
        """Number of ranks per team."""
        return self.options.team_size

    @property
    def ulysses_degree(self) -> int:
        """Number of ranks that split the heads."""
        return self.options.ulysses_degree

    @cached_property
    def layout(self) -> Layout:
        """Layout of the padded sequence.

        Ranks that split heads share tokens like the ranks of a team. If the options say
        ``balanced``, only the lengths of this layout are valid, because the positions then depend
        on the mask; ``Plan.layout`` has them.
        """
        name = self.options.layout
        slice_len = self.options.slice_len
        if name == BALANCED or (slice_len and self.size == self.ulysses_degree):
            name = "contiguous"
        team = self.team_size * self.ulysses_degree
        padded = padded_length(name, self.seq_len, self.size, team, self.options.multiple)
        parts = self.options.multiple if slice_len else 1
        return Layout(name, padded, self.size, team, slice_len, parts)

    @property
    def slots(self) -> int:
        """Number of stretches of consecutive tokens per rank, unless the layout is ``balanced``."""
        return len(self.layout.strides(0))

    @property
    def padded_len(self) -> int:
        """Sequence length, rounded up to a length that the layout can divide."""
        return self.layout.seq_len

    @property
    def local_len(self) -> int:
        """Number of positions per rank, including padding."""
        return self.padded_len // self.size

    def positions(self, rank: int) -> Tensor:
        """Return the global positions of ``rank``: int64 ``[local_len]``.

        They ascend, except in slices under tensor parallelism (``Layout.positions``). Positions of
        ``seq_len`` and above are padding.
        """
        return torch.from_numpy(self.layout.positions(self.owner(rank)))

    @kept_in_object
    def rounds_of(self, rank: int) -> tuple[Round, ...]:
        """Return the rounds of ``rank`` in order, without tiles."""
        place = self.place(rank)
        member = rank % self.ulysses_degree

        def for_rank(send: Send) -> Send:
            target = _peer_of(send.to, place)
            all_targets = np.broadcast_to(send.to, self.shape.size)
            source = int(np.argmax(all_targets == place))
            return Send(
                int(self._first_ranks[target]) + member,
                send.due,
                int(self._first_ranks[source]) + member,
            )

        rounds = []
        for step in self.rounds:
            gradient = None if step.gradient is None else for_rank(step.gradient)
            sends = tuple(map(for_rank, step.sends))
            rounds.append(Round(self.ranks_at(step.holds, place), sends, gradient))
        return tuple(rounds)

    def team(self, rank: int) -> tuple[int, ...]:
        """Return the ranks for which ``rank`` computes attention."""
        place = self.place(rank)
        return self.ranks_at(self.method.team(place, self.shape), place)

    def teammates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that gather queries and combine results together with ``rank``."""
        return tuple(self.team_groups[rank].tolist())

    def holders(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that gather KV together with ``rank`` before the first round."""
        return tuple(self.holder_groups[rank].tolist())

    def head_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that split the heads together with ``rank``."""
        return tuple(self.head_groups[rank].tolist())

    @cached_property
    def team_groups(self) -> np.ndarray:
        """Teammates of each rank: int64 ``[size, members]``."""
        team = self.method.team(np.arange(self.shape.size), self.shape)
        return np.stack([self.at_ranks(peers) for peers in team], axis=1)

    @cached_property
    def holder_groups(self) -> np.ndarray:
        """Ranks that gather KV with each rank before the first round: int64 ``[size, members]``."""
        return np.stack([self.at_ranks(peers) for peers in self.rounds[0].holds], axis=1)

    @cached_property
    def head_groups(self) -> np.ndarray:
        """Ranks that split heads with each rank: int64 ``[size, ulysses_degree]``."""
        first = np.arange(self.size) // self.ulysses_degree * self.ulysses_degree
        return first[:, None] + np.arange(self.ulysses_degree)

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Check that ``ulysses_degree`` ranks can split the heads.

        If there are fewer KV heads than ranks, several ranks hold the same KV head.

        Raises:
            ContextError: the heads cannot be split among the ranks, or into the stages; the message
                lists the numbers that work.
        """

        if not can_split(heads, kv_heads, self.ulysses_degree):
            degrees = filter(partial(can_split, heads, kv_heads), divisors(self.size))
            raise ContextError(
                f"ulysses_degree is {self.ulysses_degree} with {heads} query and {kv_heads} key "
                "heads on each rank, but it must divide the number of query heads, and divide the "
                "number of key heads or be a multiple of it; degrees that fit "
                f"{self.size} ranks: {', '.join(map(str, degrees))}"
            )
        local_heads = heads // self.ulysses_degree
        chunks = self.options.ulysses_head_chunks
        if local_heads % chunks:
            raise ContextError(
                f"ulysses_head_chunks is {chunks}, but it must divide the {local_heads} query "
                f"heads that each of {self.ulysses_degree} ranks attends with; use one of "
                f"{', '.join(map(str, divisors(local_heads)))}"
            )

    @cached_property
    def shape(self) -> Shape:
        """Numbers of places that the method arranges: in total, per team and per node."""
        per_node = min(self.options.ranks_per_node or self.size, self.size)
        return Shape(
            self.size // self.ulysses_degree,
            self.team_size,
            max(1, per_node // self.ulysses_degree),
        )

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Rounds of all places, computed in one call to the method."""
        return tuple(self.method.rounds(np.arange(self.shape.size), self.shape))

    def at_ranks(self, peers: Ranks) -> np.ndarray:
        """Convert each place's peer, int64 ``[places]``, to each rank's peer, int64 ``[size]``.

        The u-th rank of a place gets the u-th rank of the peer.
        """
        return self._at_ranks(peers.tobytes() if isinstance(peers, np.ndarray) else peers)

    @kept_in_object
    def _at_ranks(self, key: bytes | int) -> np.ndarray:
        """Compute ``at_ranks`` once per array of peers; all rounds of a ring share one array."""
        peers = np.frombuffer(key, dtype=np.int64) if isinstance(key, bytes) else key
        place_peers = np.broadcast_to(peers, self.shape.size)[self._place_of_group]
        first_ranks = self._first_ranks[place_peers]
        rank_peers: np.ndarray = (first_ranks[:, None] + np.arange(self.ulysses_degree)).ravel()
        return rank_peers

    @cached_property
    def _place_of_group(self) -> np.ndarray:
        """Place of each head group, in the order of ranks."""
        return place_of_ranks(self.options.placement, self.shape.size, self.team_size)

    @cached_property
    def _first_ranks(self) -> np.ndarray:
        """First rank of each place."""
        return np.argsort(self._place_of_group) * self.ulysses_degree

    def place(self, rank: int) -> int:
        """Return the place (head group) of ``rank``; raise ContextError for an unknown rank."""
        if not 0 <= rank < self.size:
            raise ContextError(
                f"rank {rank} does not exist; there are {self.size} ranks, numbered from 0"
            )
        return int(self._place_of_group[rank // self.ulysses_degree])

    def ranks_at(self, peers: tuple[Ranks, ...], place: int) -> tuple[int, ...]:
        """Return all ranks of the peers of ``place``, in the order of ``peers``."""
        ranks: list[int] = []
        for peer in peers:
            first_rank = int(self._first_ranks[_peer_of(peer, place)])
            ranks += range(first_rank, first_rank + self.ulysses_degree)
        return tuple(ranks)

    def owner(self, rank: int) -> int:
        """Return the index of ``rank`` in the layout.

        Layouts number all ranks of one place before those of the next place.
        """
        return self.place(rank) * self.ulysses_degree + rank % self.ulysses_degree


def _peer_of(peers: Ranks, place: int) -> int:
    """Return the peer of one place; a plain number is the peer of every place."""
    return int(peers[place]) if isinstance(peers, np.ndarray) else peers


@lru_cache(maxsize=64)
def gather_order(
    geometry: Geometry, ranks: tuple[int, ...], device: torch.device, slice_len: int = 0
) -> Tensor | None:
    """Return the permutation that sorts the gathered tokens of ``ranks`` by position, or None.

    None means that the tokens are already sorted. Otherwise the result is int64 ``[tokens of the
    ranks]`` on the device. It is cached, since making and copying it in every layer would cost more
    than the gather. ``slice_len`` is the number of each rank's tokens in a slice; 0 means all.
    """
    layout = geometry.layout.of_slice(slice_len) if slice_len else geometry.layout
    strides = [run for rank in ranks for run in layout.strides(geometry.owner(rank))]
    if strides == sorted(strides):
        return None
    ends = np.cumsum([run.length for run in strides])
    blocks = []
    for run, end in sorted(zip(strides, ends, strict=True)):
        blocks.append(np.arange(end - run.length, end))
    return torch.from_numpy(np.concatenate(blocks)).to(device)
