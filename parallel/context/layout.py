"""Tokens of a sequence: which rank owns which (layouts), and which a query sees (masks).

A layout is a bijection between (rank, local index) and global position; each rank's positions
ascend. It alone decides which tokens, labels and position ids a rank gets. With teams of C ranks,
the P / C teams take the place of ranks, and each member holds a 1 / C slice of its team's
positions, so that an all-gather in a team yields ascending positions.

A rank's positions are one or two arithmetic progressions, its strides. Plans work with strides
only. A state of linear attention takes a passage through each stretch of consecutive tokens.

A mask may change with every micro-batch; ranks and groups do not depend on it.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm
from operator import index
from typing import NamedTuple

import numpy as np
from torch import Tensor

from runtime.errors import UserError

LAYOUTS = ("contiguous", "striped", "zigzag")
BALANCED = "balanced"
"""The layout that depends on the mask (parallel/context/sparse/balanced.py)."""
PLACEMENTS = ("collect_intra", "p2p_intra")


class Stride(NamedTuple):
    """``length`` positions start, start + stride, ..., with the layout's stride."""

    start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """``seq_len`` tokens (a multiple of ``granularity``) over ``size`` ranks in teams of
    ``team_size``.
    """

    name: str
    seq_len: int
    size: int
    team_size: int = 1

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ContextError(
                f"layout {self.name!r} does not exist; use one of {', '.join(LAYOUTS)}"
            )
        if self.size < 1 or self.team_size < 1 or self.size % self.team_size:
            raise ContextError(
                f"team size {self.team_size} does not divide the context-parallel size {self.size}"
            )
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
        """Return the ascending strides of ``rank``: a block, every teams-th token, parts of a chunk
        and its mirror.
        """
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
        return np.concatenate(
            [np.arange(start, start + n * step, step) for start, n in self.strides(rank)]
        )


def granularity(name: str, size: int, team_size: int = 1) -> int:
    """Return the number that must divide the sequence length."""
    return lcm(size, 2 * (size // team_size)) if name == "zigzag" else size


def padded_length(name: str, seq_len: int, size: int, team_size: int = 1, multiple: int = 1) -> int:
    """Return ``seq_len`` rounded up so that the layout divides it and each rank gets a multiple of
    ``multiple``.
    """
    step = lcm(granularity(name, size, team_size), size * multiple)
    return -(-max(seq_len, 1) // step) * step


def places(placement: str, size: int, team_size: int) -> np.ndarray:
    """Return each rank's place in the method, a permutation (WallFacer, section 3.4): int64
    ``[size]``.

    Launchers fill nodes with consecutive ranks. A team group is G teams of C = ``team_size`` ranks,
    or C rings of G: ``collect_intra`` makes a team's ranks neighbours, which gather and reduce,
    ``p2p_intra`` a ring's ranks, so that they share a node.
    """
    if placement == "collect_intra":
        return np.arange(size)
    return (
        np.arange(size).reshape(team_size, -1, team_size).swapaxes(1, 2).ravel()
    )  # [group, team, member] before


class ContextError(UserError):
    """A context-parallel configuration that cannot work; the message gives the reason and the fix."""


Window = tuple[int, int]
"""Keys to the left and to the right that a query sees besides its own; -1 for all, as in Megatron.
"""
Reach = tuple[int | None, int | None]
"""The query at position p sees keys p - behind .. p + ahead of its document: (behind, ahead), None
for all.
"""


@dataclass(frozen=True)
class Mask:
    """Visibility of a sequence's tokens: their document, up to themselves if causal, within a
    window.
    """

    causal: bool = True
    documents: tuple[int, ...] | None = None
    """Cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len); None for one."""
    window: Window | None = None

    @property
    def reach(self) -> Reach:
        """Return how far a query sees behind and ahead of itself."""
        left, right = self.window or (-1, -1)
        return None if left < 0 else left, 0 if self.causal else None if right < 0 else right

    @property
    def whole(self) -> bool:
        """Return whether the sequence is one document without a window."""
        return self.documents is None and self.window is None


def mask_of(
    causal: bool, documents: tuple[int, ...] | None, window: Window | None, seq_len: int
) -> Mask:
    """Return the mask; equal ones compare equal.

    Raises:
        ContextError: boundaries do not ascend from 0 to ``seq_len``, or a window that sees nothing
            or the future.
    """
    return Mask(causal, _documents(documents, seq_len), _window(window, causal))


def _documents(documents: tuple[int, ...] | None, seq_len: int) -> tuple[int, ...] | None:
    """Check boundaries; return them as integers, so that equal ones share a plan."""
    if documents is not None:
        try:
            documents = tuple(index(x) for x in documents)
        except TypeError as error:
            raise ContextError(
                f"documents must be integers from 0 to seq_len {seq_len} and are {documents!r}"
            ) from error
        ascending = all(a < b for a, b in pairwise(documents))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len or not ascending:
            raise ContextError(
                f"documents must ascend from 0 to seq_len {seq_len} and are {documents}"
            )
    return documents


def _window(window: Window | None, causal: bool) -> Window | None:
    if window is None:
        return None
    try:
        left, right = (index(x) for x in window)
    except (TypeError, ValueError) as error:
        raise ContextError(
            f"window must be two integers, (left, right), and is {window!r}"
        ) from error
    if left == 0 or left < -1:
        raise ContextError(
            f"window is {window}, whose left side is {left}; give 1 or more keys, or -1 for all"
        )
    if causal and right not in (0, -1):
        raise ContextError(
            f"window is {window} under a causal mask, which sees nothing to the right; "
            f"use ({left}, 0), or full attention"
        )
    if not causal and (right == 0 or right < -1):
        raise ContextError(
            f"window is {window}, whose right side is {right}; give 1 or more keys, or -1 for all"
        )
    if left == -1 and (causal or right == -1):
        return None
    return left, 0 if causal else right


@dataclass(frozen=True)
class Passage:
    """The state's way through consecutive tokens of one rank; in the backward, its gradient's."""

    rank: int
    slot: int
    """Number of the stretch among those of its rank, by position."""
    offset: int
    """Its first token on its rank."""
    length: int
    source: int | None
    """Rank to receive from; None at the sequence's end, or if a document ends between the two."""
    target: int | None
    """Rank to send to, or None likewise."""
    goes_through: bool
    """True if the incoming state reaches the other end: no document ends inside."""
    seen: int
    """Tokens that see the incoming state: those of the first document, in the backward of the last.
    """
    documents: tuple[int, ...] | None
    """Cumulative lengths of the documents' parts in the stretch; None for one."""

    def of(self, x: Tensor) -> Tensor:
        """Return the stretch of x ``[B, T, ...]``."""
        return x.narrow(1, self.offset, self.length)


@lru_cache(maxsize=256)
def passages(
    layout: Layout, boundaries: tuple[int, ...], reverse: bool = False
) -> tuple[Passage, ...]:
    """Return the passages of all ranks in the order in which the state, or (``reverse``) its
    gradient, takes them.

    Args:
        layout: one whose ranks hold consecutive tokens, in as many stretches each.
        boundaries: first positions of the documents after the first; padding is a document.
    """
    placed = []
    for rank in range(layout.size):
        offset = 0
        for slot, (start, length) in enumerate(layout.strides(rank)):
            placed.append((start, length, rank, slot, offset))
            offset += length
    placed.sort()
    found = []
    for number, (start, length, rank, slot, offset) in enumerate(placed):
        end = start + length
        inside = tuple(bound - start for bound in boundaries if start < bound < end)
        bounds = (0, *inside, length)
        before = placed[number - 1][2] if number and start not in boundaries else None
        after = (
            placed[number + 1][2] if number + 1 < len(placed) and end not in boundaries else None
        )
        source, target = (after, before) if reverse else (before, after)
        seen = bounds[-1] - bounds[-2] if reverse else bounds[1]
        documents = bounds if inside else None
        found.append(
            Passage(rank, slot, offset, length, source, target, not inside, seen, documents)
        )
    return tuple(found[::-1] if reverse else found)
