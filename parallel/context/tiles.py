"""Tiles: the visible (query, key) pairs of two sets of positions, split into blocks for a kernel.

A rank's positions are a few arithmetic progressions (strides). Two integers compare two strides of
the same step. The query at position p sees the keys from p - behind to p + ahead, so query i sees
key j if i + e <= j <= i + d, with d = floor((q_start - k_start + ahead) / stride) and e =
ceil((q_start - k_start - behind) / stride).

If only d limits the keys, the columns below d are FULL, a CAUSAL square with its diagonal follows,
and the rows below that square are FULL. If only e limits them, the tiles are the mirror image, with
an ANTI square. If both do, the rows are cut into blocks of d - e + 1; in each block, e alone limits
the left columns and d alone the right columns. Packed documents cut the strides first. So one
function serves all layouts, teams, documents and windows, and no tile has a fully masked row or
column.

The last property matters for numerics, not only for speed: a fully masked row has lse = -inf, and
kernels disagree on its result. Here every row of every tile sees a key, so partial
results merge without special cases, and a kernel needs three masks only.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kernels.blocks import ANTI, CAUSAL, FULL, Tile, TileNumbers
from parallel.context.layout import Reach, Stride


class Piece(NamedTuple):
    """Part of a stride that lies in one document; document -1 is padding.

    ``offset`` is the local index of its first position.
    """

    start: int
    offset: int
    length: int
    document: int


def pieces(strides: Iterable[Stride], stride: int, boundaries: tuple[int, ...]) -> list[Piece]:
    """Join strides in the order of their first positions, and cut them at document boundaries.

    Adjacent strides become one piece. The positions then ascend, unless the strides of several
    ranks interleave, as in a striped layout; interleaving strides are concatenated.

    Args:
        strides: strides of one rank or of several ranks.
        stride: step between the positions of each stride.
        boundaries: ascending start positions of all documents but the first.
    """
    joined: list[Piece] = []
    for start, length in sorted(strides):
        while length:
            document = bisect_right(boundaries, start)
            inside = length
            if document < len(boundaries):
                inside = min(length, -(-(boundaries[document] - start) // stride))

            offset = 0
            if joined:
                offset = joined[-1].offset + joined[-1].length
            append_joined(joined, Piece(start, offset, inside, document), stride)
            start += inside * stride
            length -= inside
    return joined


def clipped(whole: Sequence[Piece], first: int, end: int) -> list[Piece]:
    """Return the parts of ascending pieces, of stride 1, that lie from ``first`` to ``end``."""
    begin = bisect_right(whole, first, key=lambda piece: piece.start + piece.length)
    parts: list[Piece] = []
    for piece in islice(whole, begin, None):
        if piece.start >= end:
            break
        start = max(first, piece.start)
        length = min(end, piece.start + piece.length) - start
        offset = piece.offset + start - piece.start
        parts.append(piece._replace(start=start, offset=offset, length=length))
    return parts


def append_joined(joined: list[Piece], piece: Piece, stride: int) -> None:
    """Append a piece, or extend the last piece if this one continues it."""
    if joined:
        last = joined[-1]
        end = last.document, last.offset + last.length, last.start + last.length * stride
        if end == (piece.document, piece.offset, piece.start):
            joined[-1] = last._replace(length=last.length + piece.length)
            return
    joined.append(piece)


def tiles(
    queries: Sequence[Piece], keys: Sequence[Piece], stride: int, reach: Reach
) -> tuple[Tile, ...]:
    """Return ascending tiles that cover every visible pair of these queries and keys exactly once.

    No tile has a fully masked row or column. Pieces of document -1 are padding: they see nothing
    and nothing sees them.
    """
    keys_by_document: dict[int, list[Piece]] = {}
    for k in keys:
        keys_by_document.setdefault(k.document, []).append(k)

    queries_by_document: dict[int, list[Piece]] = {}
    for q in queries:
        if q.document >= 0 and q.document in keys_by_document:
            queries_by_document.setdefault(q.document, []).append(q)

    all_blocks: list[TileNumbers] = []
    for document, rows in queries_by_document.items():
        columns = keys_by_document[document]
        blocks: list[TileNumbers] = []
        for q in rows:
            for k in columns:
                blocks += _between(q, k, stride, reach)
        if len(rows) + len(columns) > 2:  # the tiles of a single pair cannot be joined
            blocks = _joined(blocks)
        all_blocks += blocks

    all_blocks.sort()
    return tuple(
        [Tile._make((slice(q0, q1), slice(k0, k1), kind)) for q0, q1, k0, k1, kind in all_blocks]
    )


def cut_columns(whole: Iterable[Tile], columns: int) -> tuple[Tile, ...]:
    """Return the tiles with FULL ones cut into parts of at most ``columns`` keys."""
    parts: list[Tile] = []
    for tile in whole:
        if tile.kind != FULL:
            parts.append(tile)
            continue
        end = tile.k.stop
        for first in range(tile.k.start, end, columns):
            parts.append(tile._replace(k=slice(first, min(first + columns, end))))
    return tuple(parts)


def _between(q: Piece, k: Piece, stride: int, reach: Reach) -> list[TileNumbers]:
    """Return the tiles of two pieces of one document, in local indices.

    Row i sees columns i + first to i + last; ``first`` and ``last`` are e and d of the module's
    docstring. If one of them hides no column, the other alone determines the tiles.
    """
    behind, ahead = reach
    rows = q.length
    columns = k.length
    distance = q.start - k.start
    last = columns if ahead is None else (distance + ahead) // stride
    first = 1 - rows if behind is None else -((behind - distance) // stride)
    if first <= 1 - rows:
        return _compare(rows, columns, last, q.offset, k.offset)
    if last >= columns - 1:
        return _mirrored(rows, columns, first, q.offset, k.offset)

    side = last - first + 1
    if side <= 0:
        return []
    # Cut the rows that see any key into blocks of ``side``. A block's first row sees keys up to
    # some column. Left of that column only ``first`` limits the rows; right of it, only ``last``.
    blocks: list[TileNumbers] = []
    first_row = max(0, -last)
    end_row = min(rows, columns - first)
    for row in range(first_row, end_row, side):
        count = min(side, end_row - row)
        middle = min(max(row + last, 0), columns)
        q0 = q.offset + row
        blocks += _mirrored(count, middle, row + first, q0, k.offset)
        blocks += _compare(count, columns - middle, row + last - middle, q0, k.offset + middle)
    return blocks


def _mirrored(rows: int, columns: int, shift: int, q0: int, k0: int) -> list[TileNumbers]:
    """Return tiles of ``rows`` x ``columns`` from (q0, k0): row i sees columns from i + shift on.

    With rows and columns counted from their ends, row i sees columns up to i + columns - rows -
    shift, as in ``_compare``.
    """
    q1 = q0 + rows
    k1 = k0 + columns
    mirrored: list[TileNumbers] = []
    for a, b, c, d, kind in _compare(rows, columns, columns - rows - shift, 0, 0):
        mirrored.append((q1 - b, q1 - a, k1 - d, k1 - c, ANTI if kind == CAUSAL else kind))
    return mirrored


def _compare(rows: int, columns: int, shift: int, q0: int, k0: int) -> list[TileNumbers]:
    """Return tiles of ``rows`` x ``columns`` from (q0, k0): row i sees columns up to i + shift.

    For 5 rows, 5 columns and a shift of 1, they are a FULL column (F), a CAUSAL square (C), and a
    FULL row below it (G):

        F  C  .  .  .
        F  C  C  .  .
        F  C  C  C  .
        F  C  C  C  C
        F  G  G  G  G
    """
    blocks: list[TileNumbers] = []
    if shift > 0:  # columns before the square, which every row sees
        full = min(shift, columns)
        if full > 0:
            blocks.append((q0, q0 + rows, k0, k0 + full, FULL))
        columns -= full
        k0 += full
    else:  # rows before the square, which see no key
        rows += shift
        q0 -= shift

    side = min(rows, columns)
    if side > 0:
        blocks.append((q0, q0 + side, k0, k0 + side, CAUSAL))
        if rows > side:
            blocks.append((q0 + side, q0 + rows, k0, k0 + columns, FULL))
    return blocks


def _joined(blocks: list[TileNumbers]) -> list[TileNumbers]:
    """Join tiles until no two tiles can be joined.

    Fewer tiles mean fewer kernel calls, and fewer merges of partial results.
    """
    count = -1
    while len(blocks) != count:
        count = len(blocks)
        blocks = _join_beside(_join_below(_join_squares(blocks)))
    return blocks


def _join_squares(blocks: list[TileNumbers]) -> list[TileNumbers]:
    """Join two squares on one diagonal and the rectangle between them into one square.

    A rank of a team, or a rank with two zigzag chunks, has several pieces of one document. If two
    pieces are adjacent, their squares are corners of a larger square.
    """
    # A dictionary keeps the order of insertion, unlike a set.
    rectangles = {block: None for block in blocks if block[4] == FULL}
    squares = sorted(block for block in blocks if block[4] != FULL)
    by_last_corner: dict[tuple[int, int, str], TileNumbers] = {}

    for q0, q1, k0, k1, kind in squares:
        while previous := by_last_corner.get((q0, k0, kind)):
            previous_q0, _, previous_k0, _, _ = previous
            between = (q0, q1, previous_k0, k0, FULL)
            if kind == ANTI:
                between = (previous_q0, q0, k0, k1, FULL)
            if between not in rectangles:
                break
            del rectangles[between], by_last_corner[q0, k0, kind]
            q0 = previous_q0
            k0 = previous_k0

        by_last_corner[q1, k1, kind] = (q0, q1, k0, k1, kind)
    return [*by_last_corner.values(), *rectangles]


def _join_below(blocks: list[TileNumbers]) -> list[TileNumbers]:
    """Join rectangles with the same keys and adjacent rows.

    After sorting by kind, keys and first row, rectangles that can be joined are neighbours.
    """
    joined: list[TileNumbers] = []
    for block in sorted(blocks, key=lambda block: (block[4], block[2], block[3], block[0])):
        q0, q1, k0, k1, kind = block
        if joined and kind == FULL and joined[-1][1:] == (q0, k0, k1, FULL):
            joined[-1] = (joined[-1][0], q1, k0, k1, FULL)
        else:
            joined.append(block)
    return joined


def _join_beside(blocks: list[TileNumbers]) -> list[TileNumbers]:
    """Join rectangles with the same rows and adjacent keys."""
    transposed = [(k0, k1, q0, q1, kind) for q0, q1, k0, k1, kind in blocks]
    return [(q0, q1, k0, k1, kind) for k0, k1, q0, q1, kind in _join_below(transposed)]
