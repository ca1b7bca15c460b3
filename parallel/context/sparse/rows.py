"""Sets of rows: ascending, disjoint, non-adjacent intervals [first, end)."""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

Rows: TypeAlias = tuple[tuple[int, int], ...]
"""A few rows, of one buffer."""
NONE: Rows = ()


class Spans(NamedTuple):
    """Many rows: int64 ``[n]`` each."""

    first: np.ndarray
    end: np.ndarray

    def where(self, chosen: np.ndarray | slice) -> "Spans":
        """Return some of the intervals."""
        return Spans(self.first[chosen], self.end[chosen])


NOWHERE = Spans(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def count(rows: Rows) -> int:
    """Count the rows."""
    return sum(end - first for first, end in rows)


def merged(intervals: Iterable[tuple[int, int]]) -> Rows:
    """Join intervals, in ascending order of their first rows, that overlap or adjoin."""
    found: list[tuple[int, int]] = []
    for first, end in intervals:
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def places_in(part: Rows, kept: Rows, offset: int = 0) -> Rows:
    """Return where ``part`` of the rows ``kept`` lies in a buffer that holds them from ``offset`` on."""
    found, at, j = [], offset, 0
    for first, end in part:
        while kept[j][1] <= first:
            at += kept[j][1] - kept[j][0]
            j += 1
        found.append((at + first - kept[j][0], at + end - kept[j][0]))
    return merged(found)


def union(*several: Spans) -> Spans:
    """Return the rows that are in any set; the intervals given may overlap and be in any order."""
    first, end = _sorted(*several)
    if not len(first):
        return NOWHERE
    apart = first[1:] > end[:-1]  # after as many ends as firsts, nothing is open
    return Spans(first[np.append(True, apart)], end[np.append(apart, True)])


def common(a: Spans, b: Spans) -> Spans:
    """Return the rows of both sets."""
    first, end = _sorted(a, b)
    both = first[1:] < end[:-1]  # one more first than ends before it: two are open
    return Spans(first[1:], end[:-1]).where(both)


def without(a: Spans, b: Spans) -> Spans:
    """Return the rows of ``a`` that are not in ``b``."""
    if not len(a.first) or not len(b.first):
        return a
    least, most = min(a.first[0], b.first[0]) - 1, max(a.end[-1], b.end[-1]) + 1
    return common(a, Spans(np.append(least, b.end), np.append(b.first, most)))


def _sorted(*several: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return all first rows in order, and all ends."""
    present = [spans for spans in several if len(spans.first)] or [NOWHERE]
    return np.sort(np.concatenate([x.first for x in present])), np.sort(np.concatenate([x.end for x in present]))
