"""Layouts: which rank owns which token.

A layout is a bijection between (rank, local index) and global position, and each rank's positions ascend. It alone
decides which tokens, labels and position ids a rank gets. With teams of C ranks it is laid over the P / C teams, and
a member holds its 1 / C slice of the team's positions, so that an all-gather inside a team yields ascending positions.
"""

from dataclasses import dataclass
from functools import cache
from math import lcm

import numpy as np

from parallel.context.errors import ContextError

LAYOUTS = ("contiguous", "striped", "zigzag")


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
        """Distance of neighbouring positions inside a rank's arithmetic progressions."""
        return self.size // self.team_size if self.name == "striped" else 1

    def positions(self, rank: int) -> np.ndarray:
        """Ascending global positions of ``rank``: int64 ``[seq_len / size]``."""
        if not 0 <= rank < self.size:
            raise ContextError(f"rank {rank} is not among {self.size} ranks")
        team, member = divmod(rank, self.team_size)
        return np.split(_team_positions(self.name, self.seq_len, self.size // self.team_size, team), self.team_size)[
            member
        ]


def granularity(name: str, size: int, team_size: int = 1) -> int:
    """The number that a sequence length must be a multiple of."""
    return lcm(size, 2 * (size // team_size)) if name == "zigzag" else size


def padded_length(name: str, seq_len: int, size: int, team_size: int = 1, multiple: int = 1) -> int:
    """The shortest length that holds ``seq_len`` tokens and gives each rank a ``multiple`` of that many."""
    step = lcm(granularity(name, size, team_size), size * multiple)
    return -(-max(seq_len, 1) // step) * step


@cache
def _team_positions(name: str, seq_len: int, teams: int, team: int) -> np.ndarray:
    """Ascending positions of a team: one block, every teams-th token, or chunks ``team`` and its mirror image."""
    if name == "contiguous":
        block = seq_len // teams
        found = np.arange(team * block, (team + 1) * block)
    elif name == "striped":
        found = np.arange(team, seq_len, teams)
    else:
        chunk, mirror = seq_len // (2 * teams), 2 * teams - 1 - team
        halves = (np.arange(start * chunk, (start + 1) * chunk) for start in (team, mirror))
        found = np.concatenate(list(halves))
    found.setflags(write=False)  # every plan of this layout shares it
    return found
