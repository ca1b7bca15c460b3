"""Tiles: the visible (query, key) pairs of two sets of positions, as blocks for an attention kernel.

A rank's positions are a few arithmetic progressions (strides). Two of one step compare by two integers. The query
at position p sees the keys from p - behind to p + ahead, so query i sees key j if i + e <= j <= i + d, with
d = floor((q_start - k_start + ahead) / stride) and e = ceil((q_start - k_start - behind) / stride).

Without e, columns below d are FULL, a CAUSAL square with its diagonal follows, and the rows below that square are FULL.
Without d it is the mirror image, with an ANTI square. With both, rows are cut into blocks of d - e + 1; of each block's
columns, the left ones are cut by e alone and the right ones by d alone. Packed documents cut the strides first. So one
function serves all layouts, teams, documents and windows, and no tile has a fully masked row or column.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kernels.blocks import ANTI, CAUSAL, FULL, Tile, TileNumbers
from parallel.context.layout import Stride
from parallel.context.mask import Reach


class Piece(NamedTuple):
    """Part of a run in one document, -1 for padding; ``offset`` is the local index of its first position."""

    start: int
    offset: int
    length: int
    document: int


def pieces(strides: Iterable[Stride], stride: int, boundaries: tuple[int, ...]) -> list[Piece]:
    """Join strides in the order of their first positions, and cut them at documents.

    Adjacent ones become one. Joined positions ascend, unless those of several ranks interleave, as in a striped layout:
    those are concatenated.

    Args:
        strides: of one rank or several.
        stride: step between the positions of each.
        boundaries: ascending starts of all documents but the first.
    """
    found: list[Piece] = []
    for start, length in sorted(strides):
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


def tiles(queries: Sequence[Piece], keys: Sequence[Piece], stride: int, reach: Reach) -> tuple[Tile, ...]:
    """Return ascending tiles that cover every visible pair of these queries and keys exactly once.

    No tile has a fully masked row or column. Pieces of document -1 are padding: they see nothing and nothing sees them.
    """
    keys_of: dict[int, list[Piece]] = {}
    for k in keys:
        keys_of.setdefault(k.document, []).append(k)
    queries_of: dict[int, list[Piece]] = {}
    for q in queries:
        if q.document >= 0 and q.document in keys_of:
            queries_of.setdefault(q.document, []).append(q)
    found: list[TileNumbers] = []
    for document, rows in queries_of.items():
        columns = keys_of[document]
        blocks = [block for q in rows for k in columns for block in _between(q, k, stride, reach)]
        found += _coalesce(blocks) if len(rows) + len(columns) > 2 else blocks  # one pair leaves nothing to join
    found.sort()
    return tuple([Tile._make((slice(q0, q1), slice(k0, k1), kind)) for q0, q1, k0, k1, kind in found])


def _between(q: Piece, k: Piece, stride: int, reach: Reach) -> list[TileNumbers]:
    """Return the tiles of two pieces of one document, in local indices."""
    behind, ahead = reach
    distance = q.start - k.start
    last = k.length if ahead is None else (distance + ahead) // stride
    if behind is None:
        return _compare(q.length, k.length, last, q.offset, k.offset)
    return _band(q.length, k.length, -((behind - distance) // stride), last, q.offset, k.offset)


def _band(rows: int, columns: int, first: int, last: int, q0: int, k0: int) -> list[TileNumbers]:
    """Return tiles of ``rows`` x ``columns``, starting at (q0, k0), where row i sees columns i + first .. i + last."""
    if first <= 1 - rows:
        return _compare(rows, columns, last, q0, k0)
    if last >= columns - 1:
        return _mirrored(rows, columns, first, q0, k0)
    found: list[TileNumbers] = []
    side, seen = last - first + 1, range(max(0, -last), min(rows, columns - first))
    # Cut the rows that see anything into blocks of ``side``. Left of the column that a block's first row sees last,
    # only the near edge of the window cuts; from there on, only its far edge.
    for row in range(seen.start, seen.stop, side) if side > 0 else ():
        count = min(side, seen.stop - row)
        middle = min(max(row + last, 0), columns)
        found += _mirrored(count, middle, row + first, q0 + row, k0)
        found += _compare(count, columns - middle, row + last - middle, q0 + row, k0 + middle)
    return found


def _mirrored(rows: int, columns: int, shift: int, q0: int, k0: int) -> list[TileNumbers]:
    """Return tiles of ``rows`` x ``columns``, starting at (q0, k0), where row i sees columns i + shift and after.

    Counted from their ends, row i sees columns up to i + columns - rows - shift.
    """
    q1, k1 = q0 + rows, k0 + columns
    return [
        (q1 - b, q1 - a, k1 - d, k1 - c, ANTI if kind == CAUSAL else kind)
        for a, b, c, d, kind in _compare(rows, columns, columns - rows - shift, 0, 0)
    ]


def _compare(rows: int, columns: int, shift: int, q0: int, k0: int) -> list[TileNumbers]:
    """Return tiles of ``rows`` x ``columns``, starting at (q0, k0), where row i sees columns 0 .. i + shift."""
    found: list[TileNumbers] = []
    if shift > 0:  # columns before the square, seen by every row
        full = min(shift, columns)
        if full > 0:
            found.append((q0, q0 + rows, k0, k0 + full, FULL))
        columns, k0 = columns - full, k0 + full
    else:  # rows before the square, which see nothing
        rows, q0 = rows + shift, q0 - shift
    side = min(rows, columns)
    if side > 0:
        found.append((q0, q0 + side, k0, k0 + side, CAUSAL))
        if rows > side:
            found.append((q0 + side, q0 + rows, k0, k0 + columns, FULL))
    return found


def _coalesce(found: list[TileNumbers]) -> list[TileNumbers]:
    """Join neighbouring tiles, for fewer kernel calls and merges of partial results."""
    while True:
        count = len(found)
        found = _join_beside(_join_below(_join_squares(found)))
        if len(found) == count:
            return found


def _join_squares(found: list[TileNumbers]) -> list[TileNumbers]:
    """Join squares of one kind on one diagonal, with the rectangle between them, into one square."""
    rest = {block: None for block in found if block[4] == FULL}
    ending: dict[tuple[int, int, str], TileNumbers] = {}
    for q0, q1, k0, k1, kind in sorted(block for block in found if block[4] != FULL):
        r0, c0 = q0, k0
        while before := ending.get((r0, c0, kind)):
            p0, _, b0, _, _ = before
            between = (r0, q1, b0, c0, FULL) if kind == CAUSAL else (p0, r0, c0, k1, FULL)
            if between not in rest:
                break
            del rest[between], ending[r0, c0, kind]
            r0, c0 = p0, b0
        ending[q1, k1, kind] = (r0, q1, c0, k1, kind)
    return [*ending.values(), *rest]


def _join_below(found: list[TileNumbers]) -> list[TileNumbers]:
    """Join rectangles with the same keys and adjacent rows."""
    joined: list[TileNumbers] = []
    for block in sorted(found, key=lambda block: (block[4], block[2], block[3], block[0])):
        q0, q1, k0, k1, kind = block
        if joined and kind == FULL and joined[-1][1:] == (q0, k0, k1, FULL):
            joined[-1] = (joined[-1][0], q1, k0, k1, FULL)
        else:
            joined.append(block)
    return joined


def _join_beside(found: list[TileNumbers]) -> list[TileNumbers]:
    """Join rectangles with the same rows and adjacent keys."""
    turned = _join_below([(k0, k1, q0, q1, kind) for q0, q1, k0, k1, kind in found])
    return [(q0, q1, k0, k1, kind) for k0, k1, q0, q1, kind in turned]
