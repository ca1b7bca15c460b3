"""Schedules of groups of ranks: documents share groups of different size, chosen by their length.

A document gets the smallest power of two of ranks on which each has at most ``capacity`` of its
tokens. Its group splits it among its ranks, each with a chunk from its beginning and one from its
end (zigzag), and keys and values go around a ring. Other groups compute at the same time.

Three schedulers place documents in groups:

- ``megatron``: ``BalancedCPScheduler`` of megatron-core 0.16.1, itself. It forms waves, in which
  all ranks have about equal sums of squared lengths; all ranks wait for the end of a wave. verl
  uses a later version of it.
- ``longest_first``: the best case of this scheduling. Ranks do not wait for a wave, only for the
  members of their next group. Largest groups come first, then longest documents, each to the group
  that is free first, by the predicted seconds.
- ``fixed``: groups of one size, in which the longest document of the data fits, and documents in
  the order of the data (Megatron's ``DpBalancedScheduler``, the baseline of published speedups).
"""

import warnings
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from runtime.errors import UserError


class ScheduleError(UserError):
    """Raised if a document does not fit on the ranks."""


class Turn(NamedTuple):
    """A group's micro-batch: the documents that ``size`` ranks compute together."""

    first: int
    """Rank of the first member; the others follow it."""
    size: int
    lengths: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """Ranks of the group."""
        return range(self.first, self.first + self.size)

    @property
    def tokens(self) -> float:
        """Number of tokens on each rank."""
        return sum(self.lengths) / self.size


Waves = list[list[Turn]]
"""Turns in the order in which ranks take them. All ranks wait for each other after a wave."""
Seconds = Callable[[Turn], float]
"""Function that predicts the seconds of a turn."""


def group_size(length: int, capacity: int, ranks: int) -> int:
    """Return the number of ranks that share a document: the smallest power of two that is enough.

    Raises ScheduleError if it is larger than ``ranks``.
    """
    size = 1
    while size * capacity < length:
        size *= 2
    if size > ranks:
        raise ScheduleError(
            f"a document has {length} tokens, but {ranks} ranks hold {ranks * capacity}; "
            "give more --ranks or another --kinds"
        )
    return size


def longest_first(lengths: Sequence[int], ranks: int, capacity: int, seconds: Seconds) -> Waves:
    """Place the documents of a step; return a single wave, without waits.

    A turn has at most ``capacity`` tokens on a rank: a further document of the same group joins
    it, or begins a new one.

    Raises ScheduleError if a document does not fit.
    """
    ready = [0.0] * ranks  # seconds at which a rank is free
    open_turns: dict[tuple[int, int], list[int]] = {}  # lengths, keyed by first rank and size
    turns: list[Turn] = []

    def place(length: int, first: int, size: int) -> None:
        members = range(first, first + size)
        end = max(ready[first : first + size]) + seconds(Turn(first, size, (length,)))
        for rank in members:
            ready[rank] = end
        pieces = open_turns.setdefault((first, size), [])
        if sum(pieces) + length > size * capacity:
            turns.append(Turn(first, size, tuple(pieces)))
            pieces.clear()
        pieces.append(length)

    single = []
    for length in sorted(lengths, reverse=True):
        size = group_size(length, capacity, ranks)
        if size == 1:
            single.append(length)
            continue
        blocks = range(0, ranks - size + 1, size)
        place(length, min(blocks, key=lambda b: max(ready[b : b + size])), size)
    for (first, size), pieces in open_turns.items():
        turns.append(Turn(first, size, tuple(pieces)))
    turns.sort(key=lambda turn: -turn.size)
    return [turns + _on_single_ranks(single, ready, capacity, seconds)]


def _on_single_ranks(
    lengths: Sequence[int], ready: list[float], capacity: int, seconds: Seconds
) -> list[Turn]:
    """Place descending lengths on the rank that is free first; return turns of one rank."""
    free = [(time, rank) for rank, time in enumerate(ready)]
    heapify(free)
    pieces: list[list[int]] = [[] for _ in ready]
    turns = []
    for length in lengths:
        time, rank = free[0]
        if sum(pieces[rank]) + length > capacity:
            turns.append(Turn(rank, 1, tuple(pieces[rank])))
            pieces[rank] = []
        pieces[rank].append(length)
        heapreplace(free, (time + seconds(Turn(rank, 1, (length,))), rank))
    return turns + [Turn(rank, 1, tuple(rest)) for rank, rest in enumerate(pieces) if rest]


class _Group(NamedTuple):
    """A group in the terms that Megatron's scheduler uses."""

    num_ranks: int

    def size(self) -> int:
        """Return the number of ranks."""
        return self.num_ranks


def megatron(lengths: Sequence[int], ranks: int, capacity: int) -> Waves:
    """Place the documents of a step by megatron-core's ``BalancedCPScheduler``.

    Documents that a wave gives to the same ranks form a turn.

    Raises ScheduleError if a document does not fit, or the scheduler's own assertions fail.
    """
    # The import takes ten seconds, and warns of packages for GPUs.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    group_size(max(lengths), capacity, ranks)
    scheduler = BalancedCPScheduler(capacity, _Group(ranks))
    samples = list(enumerate(lengths))
    try:
        _, waves_of_ids = scheduler.get_groups_and_subsamples(samples, None)
    except AssertionError as error:
        raise ScheduleError(
            f"Megatron's scheduler fails on {ranks} ranks: {error}; give other --ranks"
        ) from error

    waves = []
    for ids_of_rank in waves_of_ids:
        turns = []
        first = 0
        while first < ranks:
            ids = ids_of_rank[first]
            last = first
            while last < ranks and ids_of_rank[last] == ids:
                last += 1
            turns.append(Turn(first, last - first, tuple(lengths[index] for index in ids)))
            first = last
        waves.append(turns)
    return waves


def fixed(lengths: Sequence[int], ranks: int, capacity: int, size: int) -> Waves:
    """Pack documents in their order for groups of ``size`` ranks; return a single wave.

    A pack has at most ``size * capacity`` tokens. Packs go to the groups in turn. If the last round
    lacks packs, the last documents of earlier packs are packs of their own, as in Megatron.
    """
    packs: list[list[int]] = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > size * capacity:
            packs.append([])
        packs[-1].append(length)

    groups = ranks // size
    index = len(packs) - 1
    while len(packs) % groups and index >= 0:
        if len(packs[index]) > 1:
            packs.append([packs[index].pop()])
        else:
            index -= 1
    turns = []
    for number, pack in enumerate(packs):
        turns.append(Turn(number % groups * size, size, tuple(pack)))
    return [turns]


class Timeline(NamedTuple):
    """Seconds of a step until the last rank is done, and the seconds of each rank's turns."""

    end: float
    busy: np.ndarray
    """Float64 ``[ranks]``."""


def run(waves: Waves, ranks: int, seconds: Seconds) -> Timeline:
    """Run a schedule: a turn begins once all its ranks are free, a wave once all ranks are."""
    ready = np.zeros(ranks)
    busy = np.zeros(ranks)
    for turns in waves:
        for turn in turns:
            members = slice(turn.first, turn.first + turn.size)
            duration = seconds(turn)
            ready[members] = ready[members].max() + duration
            busy[members] += duration
        ready[:] = ready.max()
    return Timeline(float(ready.max()), busy)
