"""Layouts (which rank owns which tokens) and masks (which tokens a query sees).

A layout is a bijection between (rank, local index) and global position; each rank's positions
ascend, except in slices under tensor parallelism. It alone decides which tokens, labels and
position ids a rank gets. With teams of C ranks, tokens are assigned to the P / C teams instead of
to ranks, and each member holds a 1 / C slice of its team's positions, so that an all-gather in a
team yields ascending positions.

A rank's positions are one or two arithmetic progressions, its strides. Plans work with strides
only, never with one number per token, so a plan for a million tokens is as quick to make as one for
a thousand. In linear attention a state passes through a rank's stretches of consecutive tokens, one
``Passage`` each.

A mask may change with every micro-batch; ranks and groups do not depend on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
"""Name of the layout that depends on the mask (parallel/context/sparse/balanced.py)."""
PLACEMENTS = ("collect_intra", "p2p_intra")


class Stride(NamedTuple):
    """The ``length`` positions start, start + stride, ..., with the stride of the layout."""

    start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """Assignment of ``seq_len`` tokens to ``size`` ranks, in teams of ``team_size``.

    ``seq_len`` must be a multiple of ``granularity``.
    """

    name: str
    seq_len: int
    size: int
    team_size: int = 1
    slice_len: int = 0
    """Number of each rank's tokens in a slice of the sequence; the ranks share each slice. 0 makes
    one slice of the whole sequence."""
    slice_parts: int = 1
    """Number of tensor-parallel ranks that split a rank's tokens into equal stretches. Each holds
    tokens of all slices, so that each slice is split as well."""

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ContextError(
                f"layout {self.name!r} does not exist; use one of {', '.join(LAYOUTS)}"
            )
        if self.size < 1 or self.team_size < 1 or self.size % self.team_size:
            raise ContextError(
                f"team size {self.team_size} does not divide the context-parallel size "
                f"{self.size}; use a team size that divides it"
            )
        step = granularity(self.name, self.size, self.team_size)
        if self.slice_len % self.slice_parts:
            raise ContextError(
                f"slices of {self.slice_len} tokens of each rank cannot be split by "
                f"{self.slice_parts} tensor-parallel ranks; set layer_chunk_size to a multiple of "
                "their number, for each sequence of a micro-batch"
            )
        if self.slice_len * self.size % step:
            raise ContextError(
                f"slices of {self.slice_len} tokens of each rank cannot be laid out {self.name}, "
                f"which needs a multiple of {step // self.size}; set layer_chunk_size to such a "
                "multiple, for each sequence of a micro-batch"
            )
        if self.seq_len < 1 or self.seq_len % step:
            padded = padded_length(self.name, self.seq_len, self.size, self.team_size)
            raise ContextError(
                f"the {self.name} layout over {self.size} ranks needs a multiple of {step} tokens, "
                f"but the sequence has {self.seq_len}; pad it to {padded}"
            )

    @property
    def stride(self) -> int:
        """Step between the positions of a ``Stride``."""
        return self.size // self.team_size if self.name == "striped" else 1

    @property
    def needs_slices(self) -> bool:
        """True if only slices can be attended to: a rank's tokens do not follow one another."""
        return self.slice_len > 0 and (self.size > 1 or self.slice_parts > 1)

    def strides(self, rank: int) -> tuple[Stride, ...]:
        """Return the ascending strides of ``rank``.

        They are one block (contiguous), every n-th token for n teams (striped), or parts of a chunk
        and of its mirror image (zigzag). Of 2 n chunks, t and 2 n - 1 - t together have the average
        work under a causal mask, since early tokens see few keys and late tokens see many.
        """
        if self.slice_len:
            of_slices = []
            for first, layout in self._slices():
                for start, length in layout.strides(rank):
                    of_slices.append(Stride(first + start, length))
            return tuple(of_slices)
        team, member = divmod(rank, self.team_size)
        num_teams = self.size // self.team_size
        local_len = self.seq_len // self.size
        first = member * local_len  # index among the team's concatenated tokens
        end = first + local_len
        if self.name == "striped":
            return (Stride(team + first * self.stride, local_len),)
        if self.name == "contiguous":
            return (Stride(rank * local_len, local_len),)

        chunk_len = self.team_size * local_len // 2
        mirror = 2 * num_teams - 1 - team
        low = Stride(team * chunk_len + first, min(end, chunk_len) - first)
        high_first = max(first, chunk_len)
        high = Stride(mirror * chunk_len + high_first - chunk_len, end - high_first)
        return tuple(run for run in (low, high) if run.length > 0)

    def of_slice(self, length: int) -> "Layout":
        """Return the layout of a slice with ``length`` tokens of each rank, from position 0 on."""
        return replace(self, seq_len=length * self.size, slice_len=0, slice_parts=1)

    def _slices(self) -> Iterator[tuple[int, "Layout"]]:
        """Yield the first position of each slice of the sequence, and the slice's layout."""
        local_len = self.seq_len // self.size
        for first in range(0, local_len, self.slice_len):
            length = min(self.slice_len, local_len - first)
            yield first * self.size, self.of_slice(length)

    def positions(self, rank: int) -> np.ndarray:
        """Return the global positions of ``rank``, int64 ``[seq_len / size]``.

        They ascend or, in slices under tensor parallelism, ascend in each of ``slice_parts``
        stretches.
        """
        if self.slice_len:
            of_slices = []
            for first, layout in self._slices():
                positions = first + layout.positions(rank)
                of_slices.append(positions.reshape(self.slice_parts, -1))
            return np.concatenate(of_slices, axis=1).ravel()
        step = self.stride
        runs = []
        for start, length in self.strides(rank):
            runs.append(np.arange(start, start + length * step, step))
        return np.concatenate(runs)


def granularity(name: str, size: int, team_size: int = 1) -> int:
    """Return the number that must divide the sequence length."""
    return lcm(size, 2 * (size // team_size)) if name == "zigzag" else size


def padded_length(name: str, seq_len: int, size: int, team_size: int = 1, multiple: int = 1) -> int:
    """Return ``seq_len`` rounded up to a length that the layout can divide.

    Each rank then gets a multiple of ``multiple`` positions.
    """
    step = lcm(granularity(name, size, team_size), size * multiple)
    return -(-max(seq_len, 1) // step) * step


def place_of_ranks(placement: str, size: int, team_size: int) -> np.ndarray:
    """Return each rank's place (its number in the method), a permutation: int64 [size].

    As in WallFacer, section 3.4: a team group is G teams of C = ``team_size`` ranks, or C rings of
    G ranks. Launchers fill nodes with consecutive ranks, so the placement decides which ranks share
    a node: those of a team, which gather and reduce (``collect_intra``), or those of a ring
    (``p2p_intra``).
    """
    if placement == "collect_intra":
        return np.arange(size)
    by_team = np.arange(size).reshape(team_size, -1, team_size)  # [group, team, member]
    return by_team.swapaxes(1, 2).ravel()


class ContextError(UserError):
    """A context-parallel configuration that cannot work, with the reason and the fix."""


Window = tuple[int, int]
"""Numbers of keys that a query sees to its left and right, besides its own; -1 for all, as in
Megatron-LM.
"""
Reach = tuple[int | None, int | None]
"""Pair (behind, ahead): the query at position p sees keys p - behind to p + ahead of its document;
None means all.
"""


def can_split(heads: int, kv_heads: int, ranks: int) -> bool:
    """Return True if ranks can split the heads; several ranks may hold the same KV head."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_slices(
    slice_len: int, causal: bool, layout: str, layout_of_slices: str, backward: str
) -> None:
    """Check that a sequence can be taken in slices, which the ranks share in one layout."""
    if slice_len < 0:
        raise ContextError(
            f"slice_len is {slice_len}; it must be 1 or more, or 0 for whole sequences"
        )
    if not causal:
        raise ContextError(
            f"slice_len is {slice_len}, but attention is full, so the first slice would "
            "need the keys of the last; use slice_len 0"
        )
    if layout not in ("auto", layout_of_slices):
        raise ContextError(
            f"context_parallel_layout is {layout!r} with slice_len {slice_len}, but "
            f"the layout of each slice is {layout_of_slices}; use auto, or slice_len 0"
        )
    if backward == "queries":
        raise ContextError(
            f"backward is queries with slice_len {slice_len}, but the gradients of a slice's keys "
            "are summed where the keys stay; use auto or kv"
        )


@dataclass(frozen=True)
class Mask:
    """Keys that a query sees: in its document, up to itself if causal, and within a window."""

    causal: bool = True
    cu_seqlens: tuple[int, ...] | None = None
    """Cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len); None means one
    document."""
    window: Window | None = None

    @property
    def reach(self) -> Reach:
        """Numbers of keys that a query sees before and after itself; None for all."""
        keys_before, keys_after = self.window or (-1, -1)
        behind = None if keys_before < 0 else keys_before
        if self.causal:
            return behind, 0
        return behind, None if keys_after < 0 else keys_after

    @property
    def whole(self) -> bool:
        """True if the sequence is one document without a window."""
        return self.cu_seqlens is None and self.window is None


def mask_of(
    causal: bool, cu_seqlens: tuple[int, ...] | None, window: Window | None, seq_len: int
) -> Mask:
    """Return the mask in its simplest form: equal masks then compare equal and share a plan.

    Raises:
        ContextError: document boundaries do not ascend from 0 to ``seq_len``, or the window has no
            keys or, under a causal mask, future keys.
    """
    return Mask(causal, _cu_seqlens(cu_seqlens, seq_len), _window(window, causal))


def _cu_seqlens(cu_seqlens: tuple[int, ...] | None, seq_len: int) -> tuple[int, ...] | None:
    """Check cumulative lengths of documents, and return them as plain integers."""
    if cu_seqlens is None:
        return None
    try:
        cu_seqlens = tuple(index(x) for x in cu_seqlens)
    except TypeError as error:
        raise ContextError(
            f"documents must be integers from 0 to seq_len {seq_len}, the cumulative lengths of "
            f"the documents, but are {cu_seqlens!r}"
        ) from error
    ascending = all(a < b for a, b in pairwise(cu_seqlens))
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != seq_len or not ascending:
        raise ContextError(
            f"documents must ascend from 0 to seq_len {seq_len}, but are {cu_seqlens}; pass the "
            "cumulative lengths of the documents"
        )
    return cu_seqlens


def _window(window: Window | None, causal: bool) -> Window | None:
    """Check a window; return None if it hides no key."""
    if window is None:
        return None
    try:
        keys_before, keys_after = (index(x) for x in window)
    except (TypeError, ValueError) as error:
        raise ContextError(
            f"window must be two integers, (left, right), but is {window!r}"
        ) from error
    if keys_before == 0 or keys_before < -1:
        raise ContextError(
            f"window is {window}, but its left side must be 1 or more keys, or -1 for all"
        )
    if causal and keys_after not in (0, -1):
        raise ContextError(
            f"window is {window}, but under a causal mask a query sees no keys to its right; "
            f"use ({keys_before}, 0), or full attention"
        )
    if not causal and (keys_after == 0 or keys_after < -1):
        raise ContextError(
            f"window is {window}, but its right side must be 1 or more keys, or -1 for all"
        )
    if keys_before == -1 and (causal or keys_after == -1):
        return None
    return keys_before, 0 if causal else keys_after


@dataclass(frozen=True)
class Passage:
    """A stretch of consecutive tokens of a rank, through which a state or its gradient passes."""

    rank: int
    slot: int
    """Index of the stretch among those of its rank, in the order of positions."""
    offset: int
    """Local index of its first token."""
    length: int
    source: int | None
    """Rank to receive the state from; None if no stretch comes before this one, or if a document
    ends between the two."""
    target: int | None
    """Rank to send the state to; None if no stretch follows, or if a document ends in between."""
    goes_through: bool
    """True if the incoming state reaches the stretch's other end, since no document ends inside."""
    num_readers: int
    """Number of the stretch's tokens that see the incoming state: those of its first document or,
    in the backward pass, of its last document.
    """
    cu_seqlens: tuple[int, ...] | None
    """Cumulative lengths of the document parts in this stretch; None if there is only one."""

    def of(self, x: Tensor) -> Tensor:
        """Return the stretch's tokens of x ``[B, T, ...]``."""
        return x.narrow(1, self.offset, self.length)


@lru_cache(maxsize=256)
def passages(
    layout: Layout, boundaries: tuple[int, ...], reverse: bool = False
) -> tuple[Passage, ...]:
    """Return the passages of all ranks in the order in which a state takes them.

    Args:
        layout: a layout in which every rank has the same number of stretches.
        boundaries: start positions of all documents but the first; padding counts as a document.
        reverse: return the passages of the state's gradient, which travels backwards.
    """
    stretches = []
    for rank in range(layout.size):
        offset = 0
        for slot, (start, length) in enumerate(layout.strides(rank)):
            stretches.append((start, length, rank, slot, offset))
            offset += length
    stretches.sort()

    ways = []
    for number, (start, length, rank, slot, offset) in enumerate(stretches):
        end = start + length
        inside = tuple(bound - start for bound in boundaries if start < bound < end)
        cu_seqlens = (0, *inside, length)

        previous_rank = None
        if number and start not in boundaries:
            previous_rank = stretches[number - 1][2]
        next_rank = None
        if number + 1 < len(stretches) and end not in boundaries:
            next_rank = stretches[number + 1][2]

        ways.append(
            Passage(
                rank=rank,
                slot=slot,
                offset=offset,
                length=length,
                source=next_rank if reverse else previous_rank,
                target=previous_rank if reverse else next_rank,
                goes_through=not inside,
                num_readers=cu_seqlens[-1] - cu_seqlens[-2] if reverse else cu_seqlens[1],
                cu_seqlens=cu_seqlens if inside else None,
            )
        )
    return tuple(ways[::-1] if reverse else ways)
