"""Layouts: which rank owns which token.

A layout is a bijection between (rank, local index) and global position; each rank's positions ascend. It alone
decides which tokens, labels and position ids a rank gets. With teams of C ranks, the P / C teams take the place of
ranks, and each member holds a 1 / C slice of its team's positions, so that an all-gather in a team yields ascending
positions.

A rank's positions are one or two arithmetic progressions, its strides. Plans work with strides only.
"""

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np

from parallel.context.errors import ContextError

LAYOUTS = ("contiguous", "striped", "zigzag")
BALANCED = "balanced"
"""The layout that depends on the mask (parallel/context/arcs)."""
PLACEMENTS = ("collect_intra", "p2p_intra")


class Stride(NamedTuple):
    """``length`` positions start, start + stride, ..., with the layout's stride."""

    start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """``seq_len`` tokens (a multiple of ``granularity``) over ``size`` ranks in teams of ``team_size``."""

    name: str
    seq_len: int
    size: int
    team_size: int = 1

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ContextError(f"layout {self.name!r} does not exist; use one of {', '.join(LAYOUTS)}")
        if self.size < 1 or self.team_size < 1 or self.size % self.team_size:
            raise ContextError(f"team size {self.team_size} does not divide the context-parallel size {self.size}")
        step = granularity(self.name, self.size, self.team_size)
        if self.seq_len < 1 or self.seq_len % step:
            raise ContextError(
                f"the {self.name} layout over {self.size} ranks needs a multiple of {step} tokens and got "
                f"{self.seq_len}; pad to {padded_length(self.name, self.seq_len, self.size, self.team_size)}"
            )

    @property
    def stride(self) -> int:
        """Return the step between the positions of a ``Stride``."""
        return self.size // self.team_size if self.name == "striped" else 1

    def strides(self, rank: int) -> tuple[Stride, ...]:
        """Return the ascending strides of ``rank``: a block, every teams-th token, parts of a chunk and its mirror."""
        if not 0 <= rank < self.size:
            raise ContextError(f"rank {rank} is not among {self.size} ranks")
        team, member = divmod(rank, self.team_size)
        own = self.seq_len // self.size
        if self.name == "striped":
            return (Stride(team + member * own * self.stride, own),)
        if self.name == "contiguous":
            return (Stride(rank * own, own),)
        chunk, mirror = self.team_size * own // 2, 2 * (self.size // self.team_size) - 1 - team
        first, last = member * own, (member + 1) * own  # of the team's two chunks, joined
        low = Stride(team * chunk + first, min(last, chunk) - first)
        high = Stride(mirror * chunk + max(first, chunk) - chunk, last - max(first, chunk))
        return tuple(run for run in (low, high) if run.length > 0)

    def positions(self, rank: int) -> np.ndarray:
        """Return the ascending global positions of ``rank``: int64 ``[seq_len / size]``."""
        step = self.stride
        return np.concatenate([np.arange(start, start + n * step, step) for start, n in self.strides(rank)])


def granularity(name: str, size: int, team_size: int = 1) -> int:
    """Return the number that must divide the sequence length."""
    return lcm(size, 2 * (size // team_size)) if name == "zigzag" else size


def padded_length(name: str, seq_len: int, size: int, team_size: int = 1, multiple: int = 1) -> int:
    """Return ``seq_len`` rounded up so that the layout divides it and each rank gets a multiple of ``multiple``."""
    step = lcm(granularity(name, size, team_size), size * multiple)
    return -(-max(seq_len, 1) // step) * step


def places(placement: str, size: int, team_size: int) -> np.ndarray:
    """Return each rank's place in the method, a permutation (WallFacer, section 3.4): int64 ``[size]``.

    Launchers fill nodes with consecutive ranks. A team group is G teams of C = ``team_size`` ranks, or C rings of G:
    ``collect_intra`` makes a team's ranks neighbours, which gather and reduce, ``p2p_intra`` a ring's ranks, so that
    they share a node.
    """
    if placement == "collect_intra":
        return np.arange(size)
    return np.arange(size).reshape(team_size, -1, team_size).swapaxes(1, 2).ravel()  # [group, team, member] before
