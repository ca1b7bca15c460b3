"""Sets of rows as ascending, disjoint, non-adjacent intervals [first, end)."""

from collections.abc import Iterable
from typing import TypeAlias

Rows: TypeAlias = tuple[tuple[int, int], ...]
NONE: Rows = ()


def count(rows: Rows) -> int:
    """Count the rows."""
    return sum(end - first for first, end in rows)


def union(*several: Rows) -> Rows:
    """Return the rows that are in any set."""
    present = [rows for rows in several if rows]
    if len(present) <= 1:
        return present[0] if present else NONE
    return merged(sorted(interval for rows in present for interval in rows))


def merged(intervals: Iterable[tuple[int, int]]) -> Rows:
    """Join intervals, in ascending order of their first rows, that overlap or adjoin."""
    found: list[tuple[int, int]] = []
    for first, end in intervals:
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def common(a: Rows, b: Rows) -> Rows:
    """Return the rows of both sets."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        first, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if first < end:
            found.append((first, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def without(a: Rows, b: Rows) -> Rows:
    """Return the rows of ``a`` that are not in ``b``."""
    found, j = [], 0
    for first, end in a:
        while j < len(b) and b[j][1] <= first:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if first < b[k][0]:
                found.append((first, b[k][0]))
            first = max(first, b[k][1])
            k += 1
        if first < end:
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
