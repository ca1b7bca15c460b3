"""Count visible (query, key) pairs and tiles of all ranks and rounds, without making every tile.

The planner compares many methods and layouts, and a plan of a thousand ranks has a million rounds.
Making their tiles one after the other took minutes. Tiles never cross documents, so the unit here
is a *group*: the queries and keys of one document at one place (a head group of ranks) in one
round. Groups with equal lengths and equal distances have equal tiles, and a method repeats a few
patterns on all ranks. So numpy computes the pattern of every group, and ``tiles`` runs once per
distinct pattern.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kernels.blocks import FULL, Tile
from parallel.context.layout import Reach
from parallel.context.tiles import Piece, tiles

NO_PIECE = Piece(0, 0, 0, -1)
START, OFFSET, LENGTH, DOCUMENT = range(4)  # column of each field of a piece
# Number of pieces compared at once: enough to hide the overhead of numpy's calls, while the arrays
# take only a few megabytes.
AT_ONCE = 1 << 16

Block = tuple[int, int]
"""Numbers of queries and keys of a block that a kernel computes whole or not at all."""
PatternCounts = dict[tuple[int, int, bytes], tuple[int, ...]]
"""A pattern's numbers as in ``Work``, keyed by pattern."""
PlacedPieces = tuple[np.ndarray, np.ndarray]
"""Places ``[n]`` and their pieces ``[n, 4]``, row by row; sorted by place and document."""


class Work(NamedTuple):
    """Numbers of (query, key) pairs and of tiles: int64 ``[rounds, places]``.

    A place is a head group of ranks.
    """

    pairs: np.ndarray
    """Visible pairs."""
    tiles: np.ndarray
    """Tiles."""
    hidden: np.ndarray
    """Pairs that lie in tiles, but that no query sees."""
    masked: np.ndarray
    """Visible pairs of the tiles that have hidden pairs too."""
    rounded: np.ndarray
    """Hidden pairs in blocks that also have visible ones; a kernel computes such blocks whole."""


class PieceSets:
    """Sets of pieces, as one array: each set has the positions of one or several ranks."""

    def __init__(self, members: Sequence[list[Piece]]) -> None:
        self.max_pieces = max(1, *map(len, members))
        padded = []
        for pieces in members:
            by_document = sorted(pieces, key=lambda piece: piece.document)
            padded.append([*by_document, *[NO_PIECE] * (self.max_pieces - len(pieces))])

        self._pieces = np.array(padded, dtype=np.int64)  # [sets, max_pieces, 4]
        self._used = self._pieces[:, :, DOCUMENT] >= 0

    def gather(self, set_index: np.ndarray) -> PlacedPieces:
        """Return the pieces of every place.

        Args:
            set_index: the set of each place, int64 ``[places]``.
        """
        place, piece = np.nonzero(self._used[set_index])
        return place, self._pieces[set_index[place], piece]


def count_work(
    queries: PieceSets,
    keys: PieceSets,
    pairings: Sequence[tuple[np.ndarray, np.ndarray] | None],
    stride: int,
    reach: Reach,
    block: Block,
) -> Work:
    """Count the work of every round.

    Args:
        queries, keys: sets to pair.
        pairings: per round, the set indices of every place's queries and keys; None if nothing is
            computed.
        stride, reach: as in ``tiles``.
        block: the kernel's block, for the rounded pairs.
    """
    computing = [index for index, pairing in enumerate(pairings) if pairing is not None]
    computed = np.array(computing)
    index_pairs = np.array([pairing for pairing in pairings if pairing is not None])
    q, k = index_pairs.swapaxes(0, 1)  # [rounds, places]
    num_places = q.shape[1]

    # Process some rounds at a time, so that the columns of pieces fit into a few megabytes.
    shape = (len(Work._fields), len(pairings), num_places)
    work = Work(*np.zeros(shape, dtype=np.int64))
    pattern_counts: PatternCounts = {}
    rounds_at_once = max(1, AT_ONCE // (num_places * max(queries.max_pieces, keys.max_pieces)))
    for start in range(0, len(computed), rounds_at_once):
        rounds = slice(start, start + rounds_at_once)
        counts = _counts(
            queries.gather(q[rounds].ravel()),
            keys.gather(k[rounds].ravel()),
            q[rounds].size,
            stride,
            reach,
            block,
            pattern_counts,
        )

        for total, count in zip(work, counts, strict=True):
            total[computed[rounds]] = count.reshape(-1, num_places)
    return work


def _counts(
    queries: PlacedPieces,
    keys: PlacedPieces,
    num_places: int,
    stride: int,
    reach: Reach,
    block: Block,
    pattern_counts: PatternCounts,
) -> np.ndarray:
    """Count the work of each place, int64 ``[fields of Work, places]``.

    Args:
        queries, keys: pieces of all places in some rounds.
        num_places: number of places, each counted once per round.
        stride, reach: as in ``tiles``.
        block: as in ``count_work``.
        pattern_counts: counts of the patterns so far; new ones are added.
    """
    totals = np.zeros((len(Work._fields), num_places), dtype=np.int64)
    for place, q, k in _groups(queries, keys):
        # np.unique is fast on one value per row: view each row of numbers as one value of raw
        # bytes.
        patterns = np.ascontiguousarray(_patterns(q, k, stride, reach))
        row_dtype = np.dtype((np.void, patterns.itemsize * patterns.shape[1]))
        rows = patterns.view(row_dtype).ravel()
        kinds, examples, kind_index = np.unique(rows, return_index=True, return_inverse=True)

        names = [(q.shape[1], k.shape[1], kind.tobytes()) for kind in kinds]
        for name, example in zip(names, examples, strict=True):
            if name in pattern_counts:
                continue
            blocks = tiles(_as_pieces(q[example]), _as_pieces(k[example]), stride, reach)
            pattern_counts[name] = _sums(blocks, block)

        counts = np.array([pattern_counts[name] for name in names])[kind_index]
        for total, count in zip(totals, counts.T, strict=True):
            np.add.at(total, place, count)
    return totals


def _sums(blocks: Sequence[Tile], block: Block) -> tuple[int, ...]:
    """Return the numbers of ``Work`` for a group's tiles."""
    masked = [tile for tile in blocks if tile.kind != FULL]
    return (
        sum(tile.pairs for tile in blocks),
        len(blocks),
        sum(tile.hidden for tile in masked),
        sum(tile.pairs for tile in masked),
        sum(tile.rounded(block) for tile in masked),
    )


def _as_pieces(rows: np.ndarray) -> list[Piece]:
    """Convert rows ``[n, 4]`` to pieces."""
    return [Piece(*row) for row in rows.tolist()]


def _groups(
    queries: PlacedPieces, keys: PlacedPieces
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the groups of m pieces of queries and n pieces of keys, for one (m, n) after another.

    Yields place ``[groups]``, queries ``[groups, m, 4]`` and keys ``[groups, n, 4]``.
    """
    q_place, q = queries
    k_place, k = keys

    # One number for each place and document. Pieces are sorted by it, so equal ones are adjacent.
    num_documents = 1 + max(q[:, DOCUMENT].max(initial=0), k[:, DOCUMENT].max(initial=0))
    q_name, q_first, q_count = _runs(q_place * num_documents + q[:, DOCUMENT])
    k_name, k_first, k_count = _runs(k_place * num_documents + k[:, DOCUMENT])

    # Pair the queries and keys of the same place and document.
    match = np.minimum(np.searchsorted(k_name, q_name), max(0, len(k_name) - 1))
    shared = match[:0]
    if len(k_name):
        shared = np.flatnonzero(k_name[match] == q_name)

    place = q_name[shared] // num_documents
    match = match[shared]
    q_first = q_first[shared]
    q_count = q_count[shared]
    k_first = k_first[match]
    k_count = k_count[match]

    # Groups with equal m and n form one array.
    sizes = q_count * (len(k) + 1) + k_count
    for size in np.unique(sizes):
        (groups,) = np.nonzero(sizes == size)
        m = q_count[groups[0]]
        n = k_count[groups[0]]
        yield (
            place[groups],
            q[q_first[groups, None] + np.arange(m)],
            k[k_first[groups, None] + np.arange(n)],
        )


def _runs(names: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct values of ascending ``names``, their first indices and their counts."""
    first = np.flatnonzero(np.diff(names, prepend=-1))
    return names[first], first, np.diff(first, append=len(names))


def _patterns(q: np.ndarray, k: np.ndarray, stride: int, reach: Reach) -> np.ndarray:
    """Return a pattern of each group, int64 ``[groups, numbers]``: equal rows have equal tiles.

    The numbers are the lengths, the offsets from the first piece, and the first and last key that a
    piece's first query sees in each piece of keys. The keys are numbered as in ``tiles``, but
    clipped if they lie beyond the piece, since all keys or none are then hidden.
    """
    rows = q[:, :, None, LENGTH]  # [groups, m, 1]
    columns = k[:, None, :, LENGTH]  # [groups, 1, n]
    distance = q[:, :, None, START] - k[:, None, :, START]  # [groups, m, n]
    behind, ahead = reach
    last = columns if ahead is None else (distance + ahead) // stride
    first = -rows if behind is None else -((behind - distance) // stride)

    # Keys beyond the ends of the pieces change no tile: clip the numbers, so that more groups are
    # equal.
    numbers = []
    for edge in (first, last):
        numbers.append(np.broadcast_to(np.clip(edge, -rows, columns), distance.shape))

    for side in (q, k):
        numbers.append(side[:, :, LENGTH])
        numbers.append(side[:, :, OFFSET] - side[:, :1, OFFSET])
    return np.concatenate([x.reshape(len(q), -1) for x in numbers], axis=1)
