"""Best fit decreasing: conversations into sequences of one length."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from data.text.indexed import write_index


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins: each, the longest first, into the bin with the least room that is enough.

    It takes at most 11/9 of the least possible number of bins, and 1 more (Johnson et al. 1974, "Worst-case performance
    bounds for simple one-dimensional packing algorithms").

    Args:
        lengths: of the items, each in [1, capacity].

    Returns:
        Numbers of the items of each bin, ascending. The same lengths give the same bins.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # ascending and distinct: the rooms that some bin has
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        at = bisect_left(rooms, lengths[item])
        if at == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        bins[number].append(item)
        left = room - lengths[item]
        if left and left not in with_room:
            insort(rooms, left)
        if left:
            with_room[left].append(number)
    return [sorted(items) for items in bins]


def write_packed(
    sources: Sequence[tuple[Path, np.dtype]], pairs: Sequence[tuple[Path, Path]], lengths: np.ndarray, capacity: int
) -> int:
    """Write .bin/.idx pairs of packed items, in which an item is a sequence and a bin, in a random order, a document.

    Args:
        sources: for each pair, the file of the items' values, one after the other, and their dtype.
        pairs: the files to write.
        lengths: values of each item, int32, each in [1, capacity].

    Returns:
        The number of bins.
    """
    bins = best_fit_decreasing(lengths.tolist(), capacity)
    # Packed by length, and training takes the validation split from the end: that is to be a sample of all.
    bins = [bins[number] for number in np.random.default_rng(0).permutation(len(bins))]
    items = np.fromiter(chain.from_iterable(bins), np.int64)
    bounds = np.cumsum([0, *map(len, bins)], dtype=np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    for (source, dtype), (data, index) in zip(sources, pairs, strict=True):
        values = np.memmap(source, dtype=dtype, mode="r")
        with data.open("wb") as file:
            for item in items:
                file.write(values[ends[item] - lengths[item] : ends[item]].tobytes())
        write_index(index, dtype, lengths[items], bounds)
    return len(bins)
