"""Tiles: the unmasked (query, key) pairs of two sets of positions, as blocks for an attention kernel.

A rank's positions are a few arithmetic progressions (runs). Two runs of one stride compare by a single integer:
query i sees key j if j <= i + d, d = floor((q_start - k_start) / stride). Columns below d are FULL, a CAUSAL square
with its diagonal follows, and the rows below that square are FULL. Packed documents cut the runs first. So one function
serves all layouts, teams and documents, and no tile has a fully masked row.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from kernels.attention import CAUSAL, FULL
from kernels.tiles import Tile
from parallel.context.layout import Run


class Piece(NamedTuple):
    """Part of a run in one document; ``offset`` is the local index of its first position."""

    start: int
    offset: int
    length: int
    document: int


def pieces(runs: Iterable[Run], stride: int, boundaries: tuple[int, ...]) -> list[Piece]:
    """Join runs in the order of their first positions, and cut them at documents.

    Adjacent runs become one. Joined positions ascend, unless runs of several ranks interleave, as in a striped layout:
    those are concatenated.

    Args:
        runs: of one rank or several.
        stride: step between the positions of a run.
        boundaries: ascending starts of all documents but the first.
    """
    found: list[Piece] = []
    for run in sorted(runs):
        start, length = run
        while length:
            document = bisect_right(boundaries, start)
            ends = boundaries[document] if document < len(boundaries) else start + length * stride
            inside = min(length, -(-(ends - start) // stride))
            last = found[-1] if found else None
            offset = last.offset + last.length if last else 0
            if last and last.document == document and last.start + last.length * stride == start:
                found[-1] = last._replace(length=last.length + inside)
            else:
                found.append(Piece(start, offset, inside, document))
            start, length = start + inside * stride, length - inside
    return found


def tiles(queries: list[Piece], keys: list[Piece], stride: int, causal: bool) -> tuple[Tile, ...]:
    """Return tiles that cover every unmasked pair of these queries and keys exactly once."""
    keys_of: dict[int, list[Piece]] = {}
    for k in keys:
        keys_of.setdefault(k.document, []).append(k)
    found: set[tuple[int, int, int, int, str]] = set()
    for q in queries:
        for k in keys_of.get(q.document, ()):
            shift = (q.start - k.start) // stride if causal else k.length
            for q0, q1, k0, k1, kind in _compare(q.length, k.length, shift):
                found.add((q0 + q.offset, q1 + q.offset, k0 + k.offset, k1 + k.offset, kind))
    return tuple(Tile(slice(q0, q1), slice(k0, k1), kind) for q0, q1, k0, k1, kind in sorted(_coalesce(found)))


def _compare(rows: int, columns: int, shift: int) -> list[tuple[int, int, int, int, str]]:
    """Return tiles of ``rows`` x ``columns`` where row i sees columns 0 .. i + shift."""
    full = min(max(shift, 0), columns)  # columns before the square, seen by every row
    first = min(max(-shift, 0), rows)  # rows before the square, which see nothing
    side = min(rows - first, columns - full)
    candidates = [
        (0, rows, 0, full, FULL),
        (first, first + side, full, full + side, CAUSAL),
        (first + side, rows, full, columns, FULL),
    ]
    return [(q0, q1, k0, k1, kind) for q0, q1, k0, k1, kind in candidates if q0 < q1 and k0 < k1]


def _coalesce(found: set[tuple[int, int, int, int, str]]) -> set[tuple[int, int, int, int, str]]:
    """Join neighbouring tiles, for fewer kernel calls and merges of partial results."""
    while joined := _join_causal(found) or _join_full(found):
        found = joined
    return found


def _join_causal(found: set[tuple[int, int, int, int, str]]) -> set[tuple[int, int, int, int, str]] | None:
    """Join two squares on one diagonal and the rectangle below the first and left of the second into a square."""
    squares = {(q0, k0): (q0, q1, k0, k1, kind) for q0, q1, k0, k1, kind in found if kind == CAUSAL}
    for q0, q1, k0, k1, _ in squares.values():
        after = squares.get((q1, k1))
        if after is not None and (between := (q1, after[1], k0, k1, FULL)) in found:
            return found - {(q0, q1, k0, k1, CAUSAL), after, between} | {(q0, after[1], k0, after[3], CAUSAL)}
    return None


def _join_full(found: set[tuple[int, int, int, int, str]]) -> set[tuple[int, int, int, int, str]] | None:
    """Join two rectangles with the same keys and adjacent rows, or the same rows and adjacent keys."""
    rectangles = [tile for tile in found if tile[4] == FULL]
    below = {(q0, k0, k1): (q0, q1, k0, k1, kind) for q0, q1, k0, k1, kind in rectangles}
    beside = {(q0, q1, k0): (q0, q1, k0, k1, kind) for q0, q1, k0, k1, kind in rectangles}
    for q0, q1, k0, k1, _ in rectangles:
        if (lower := below.get((q1, k0, k1))) is not None:
            return found - {(q0, q1, k0, k1, FULL), lower} | {(q0, lower[1], k0, k1, FULL)}
        if (right := beside.get((q0, q1, k1))) is not None:
            return found - {(q0, q1, k0, k1, FULL), right} | {(q0, q1, k0, right[3], FULL)}
    return None
