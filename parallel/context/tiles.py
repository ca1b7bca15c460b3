"""Tiles: the visible (query, key) pairs of two sets of positions, as blocks for an attention
kernel.

A rank's positions are a few arithmetic progressions (strides). Two of one step compare by two
integers. The query at position p sees the keys from p - behind to p + ahead, so query i sees key j
if i + e <= j <= i + d, with d = floor((q_start - k_start + ahead) / stride) and e = ceil((q_start -
k_start - behind) / stride).

Without e, columns below d are FULL, a CAUSAL square with its diagonal follows, and the rows below
that square are FULL. Without d it is the mirror image, with an ANTI square. With both, rows are cut
into blocks of d - e + 1; of each block's columns, the left ones are cut by e alone and the right
ones by d alone. Packed documents cut the strides first. So one function serves all layouts, teams,
documents and windows, and no tile has a fully masked row or column.

The work of all ranks in all rounds is counted in pairs and tiles. Tiles never cross documents, so a
group is tiled at a time, what one place's queries and keys have of one document, and groups of the
same pattern once.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kernels.blocks import ANTI, CAUSAL, FULL, Tile, TileNumbers
from parallel.context.layout import Reach, Stride


class Piece(NamedTuple):
    """Part of a run in one document, -1 for padding; ``offset`` is the local index of its first
    position.
    """

    start: int
    offset: int
    length: int
    document: int


def pieces(strides: Iterable[Stride], stride: int, boundaries: tuple[int, ...]) -> list[Piece]:
    """Join strides in the order of their first positions, and cut them at documents.

    Adjacent ones become one. Joined positions ascend, unless those of several ranks interleave, as
    in a striped layout: those are concatenated.

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
            offset = found[-1].offset + found[-1].length if found else 0
            append_joined(found, Piece(start, offset, inside, document), stride)
            start, length = start + inside * stride, length - inside
    return found


def append_joined(found: list[Piece], piece: Piece, stride: int) -> None:
    """Append a piece, or lengthen the last one that it goes on."""
    if found:
        last = found[-1]
        ends = last.document, last.offset + last.length, last.start + last.length * stride
        if ends == (piece.document, piece.offset, piece.start):
            found[-1] = last._replace(length=last.length + piece.length)
            return
    found.append(piece)


def tiles(
    queries: Sequence[Piece], keys: Sequence[Piece], stride: int, reach: Reach
) -> tuple[Tile, ...]:
    """Return ascending tiles that cover every visible pair of these queries and keys exactly once.

    No tile has a fully masked row or column. Pieces of document -1 are padding: they see nothing
    and nothing sees them.
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
        count = (
            len(blocks) if len(rows) + len(columns) == 2 else -1
        )  # one pair leaves nothing to join
        while len(blocks) != count:  # fewer kernel calls, and fewer merges of partial results
            count, blocks = len(blocks), _join_beside(_join_below(_join_squares(blocks)))
        found += blocks
    found.sort()
    return tuple(
        [Tile._make((slice(q0, q1), slice(k0, k1), kind)) for q0, q1, k0, k1, kind in found]
    )


def _between(q: Piece, k: Piece, stride: int, reach: Reach) -> list[TileNumbers]:
    """Return the tiles of two pieces of one document, in local indices: row i sees columns i +
    first .. i + last.
    """
    behind, ahead = reach
    rows, columns, q0, k0, distance = q.length, k.length, q.offset, k.offset, q.start - k.start
    last = columns if ahead is None else (distance + ahead) // stride
    first = 1 - rows if behind is None else -((behind - distance) // stride)
    if first <= 1 - rows:
        return _compare(rows, columns, last, q0, k0)
    if last >= columns - 1:
        return _mirrored(rows, columns, first, q0, k0)
    found: list[TileNumbers] = []
    side, seen = last - first + 1, range(max(0, -last), min(rows, columns - first))
    # Cut the rows that see anything into blocks of ``side``. Left of the column that a block's
    # first row sees last, only the near edge of the window cuts; from there on, only its far edge.
    for row in range(seen.start, seen.stop, side) if side > 0 else ():
        count = min(side, seen.stop - row)
        middle = min(max(row + last, 0), columns)
        found += _mirrored(count, middle, row + first, q0 + row, k0)
        found += _compare(count, columns - middle, row + last - middle, q0 + row, k0 + middle)
    return found


def _mirrored(rows: int, columns: int, shift: int, q0: int, k0: int) -> list[TileNumbers]:
    """Return tiles of ``rows`` x ``columns``, starting at (q0, k0), where row i sees columns i +
    shift and after.

    Counted from their ends, row i sees columns up to i + columns - rows - shift.
    """
    q1, k1 = q0 + rows, k0 + columns
    return [
        (q1 - b, q1 - a, k1 - d, k1 - c, ANTI if kind == CAUSAL else kind)
        for a, b, c, d, kind in _compare(rows, columns, columns - rows - shift, 0, 0)
    ]


def _compare(rows: int, columns: int, shift: int, q0: int, k0: int) -> list[TileNumbers]:
    """Return tiles of ``rows`` x ``columns``, starting at (q0, k0), where row i sees columns 0 .. i
    + shift.
    """
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


NOWHERE = Piece(0, 0, 0, -1)
START, OFFSET, LENGTH, DOCUMENT = range(4)  # fields of a piece, as columns
AT_ONCE = 1 << 16  # pieces; enough that numpy's calls cost little, and few megabytes

Known = dict[tuple[int, int, bytes], tuple[int, int, int]]  # pattern -> (pairs, tiles, hidden)


class Work(NamedTuple):
    """Visible (query, key) pairs, tiles and the pairs that these hide: int64 ``[rounds, places]``;
    a place is a head group of ranks.
    """

    pairs: np.ndarray
    tiles: np.ndarray
    hidden: np.ndarray


class Sets:
    """Positions of several ranks or groups, as pieces; padding is left out."""

    def __init__(self, members: Sequence[list[Piece]]) -> None:
        self.most = max(1, *map(len, members))
        by_document = (sorted(pieces, key=lambda piece: piece.document) for pieces in members)
        padded = [[*pieces, *[NOWHERE] * (self.most - len(pieces))] for pieces in by_document]
        self._pieces = np.array(padded, dtype=np.int64)  # [sets, most, 4]
        self._used = self._pieces[:, :, DOCUMENT] >= 0

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return place ``[n]`` and piece ``[n, 4]`` of what the set of each place holds, by place
        and document.
        """
        place, index = np.nonzero(self._used[places])
        return place, self._pieces[places[place], index]


def work(
    queries: Sets,
    keys: Sets,
    pairings: Sequence[tuple[np.ndarray, np.ndarray] | None],
    stride: int,
    reach: Reach,
) -> Work:
    """Compute the work of every round.

    Args:
        queries, keys: sets to pair. pairings: per round, the indices of every place's queries and
        keys; None if nothing is computed. stride, reach: as in ``tiles``.
    """
    computed = np.array([index for index, pairing in enumerate(pairings) if pairing is not None])
    q, k = np.array([pairing for pairing in pairings if pairing is not None]).swapaxes(
        0, 1
    )  # [rounds, places]
    found = Work(*np.zeros((3, len(pairings), q.shape[1]), dtype=np.int64))
    known: Known = {}
    few = max(1, AT_ONCE // (q.shape[1] * max(queries.most, keys.most)))
    for start in range(0, len(computed), few):
        rounds = slice(start, start + few)
        counts = _counts(
            queries.at(q[rounds].ravel()),
            keys.at(k[rounds].ravel()),
            q[rounds].size,
            stride,
            reach,
            known,
        )
        for total, count in zip(found, counts, strict=True):
            total[computed[rounds]] = count.reshape(-1, q.shape[1])
    return found


def _counts(
    queries: tuple[np.ndarray, np.ndarray],
    keys: tuple[np.ndarray, np.ndarray],
    places: int,
    stride: int,
    reach: Reach,
    known: Known,
) -> np.ndarray:
    """Return pairs, tiles and hidden pairs of each place, int64 ``[3, places]``; adds to ``known``
    what is new.
    """
    found = np.zeros((3, places), dtype=np.int64)
    for place, q, k in _groups(queries, keys):
        patterns = np.ascontiguousarray(_patterns(q, k, stride, reach))
        rows = patterns.view(np.dtype((np.void, patterns.itemsize * patterns.shape[1]))).ravel()
        kinds, first, which = np.unique(rows, return_index=True, return_inverse=True)
        names = [(q.shape[1], k.shape[1], kind.tobytes()) for kind in kinds]
        for name, group in zip(names, first, strict=True):
            if name not in known:
                made = tiles(_as_pieces(q[group]), _as_pieces(k[group]), stride, reach)
                known[name] = (
                    sum(tile.pairs for tile in made),
                    len(made),
                    sum(tile.hidden for tile in made),
                )
        counts = np.array([known[name] for name in names])[which]
        for total, count in zip(found, counts.T, strict=True):
            np.add.at(total, place, count)
    return found


def _as_pieces(rows: np.ndarray) -> list[Piece]:
    return [Piece(*row) for row in rows.tolist()]


def _groups(
    queries: tuple[np.ndarray, np.ndarray], keys: tuple[np.ndarray, np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield place ``[groups]``, queries ``[groups, m, 4]`` and keys ``[groups, n, 4]`` for each m
    and n there are.
    """
    (q_place, q), (k_place, k) = queries, keys
    documents = 1 + max(q[:, DOCUMENT].max(initial=0), k[:, DOCUMENT].max(initial=0))
    q_name, q_first, q_count = _runs(q_place * documents + q[:, DOCUMENT])
    k_name, k_first, k_count = _runs(k_place * documents + k[:, DOCUMENT])
    found = np.minimum(np.searchsorted(k_name, q_name), max(0, len(k_name) - 1))
    shared = np.flatnonzero(k_name[found] == q_name) if len(k_name) else found[:0]
    place, found = q_name[shared] // documents, found[shared]
    q_first, q_count, k_first, k_count = (
        q_first[shared],
        q_count[shared],
        k_first[found],
        k_count[found],
    )
    sizes = q_count * (len(k) + 1) + k_count
    for size in np.unique(sizes):
        (chosen,) = np.nonzero(sizes == size)
        m, n = q_count[chosen[0]], k_count[chosen[0]]
        yield (
            place[chosen],
            q[q_first[chosen, None] + np.arange(m)],
            k[k_first[chosen, None] + np.arange(n)],
        )


def _runs(names: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct ones of ascending ``names``, where each starts and how often it stands."""
    first = np.flatnonzero(np.diff(names, prepend=-1))
    return names[first], first, np.diff(first, append=len(names))


def _patterns(q: np.ndarray, k: np.ndarray, stride: int, reach: Reach) -> np.ndarray:
    """Return int64 ``[groups, numbers]``, equal rows for equal tiles.

    The numbers are the lengths, the offsets from the first piece, and the first and last key that
    the first query of a piece sees of each piece of keys, as in ``tiles``; they differ from those
    only where all or nothing is seen.
    """
    rows, columns = q[:, :, None, LENGTH], k[:, None, :, LENGTH]  # [groups, m, n] together
    distance = q[:, :, None, START] - k[:, None, :, START]
    behind, ahead = reach
    last = columns if ahead is None else (distance + ahead) // stride
    first = -rows if behind is None else -((behind - distance) // stride)
    edges = [
        np.broadcast_to(np.clip(edge, -rows, columns), distance.shape) for edge in (first, last)
    ]
    shapes = [
        x for side in (q, k) for x in (side[:, :, LENGTH], side[:, :, OFFSET] - side[:, :1, OFFSET])
    ]
    return np.concatenate([x.reshape(len(q), -1) for x in (*edges, *shapes)], axis=1)
