"""Work of all ranks in all rounds, in pairs and tiles. What has the same pattern is tiled once.

Tiles never cross documents, so a group is tiled at a time: what one place's queries and keys have of one document.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from parallel.context.mask import Reach
from parallel.context.tiles import Piece, tiles

NOWHERE = Piece(0, 0, 0, -1)
START, OFFSET, LENGTH, DOCUMENT = range(4)  # fields of a piece, as columns
AT_ONCE = 1 << 16  # pieces; enough that numpy's calls cost little, and few megabytes

Known = dict[tuple[int, int, bytes], tuple[int, int, int]]  # pattern -> (pairs, tiles, hidden)


class Work(NamedTuple):
    """Visible (query, key) pairs, tiles and the pairs that these hide: int64 ``[rounds, places]``; a place is a head
    group of ranks.
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
        """Return place ``[n]`` and piece ``[n, 4]`` of what the set of each place holds, by place and document."""
        place, index = np.nonzero(self._used[places])
        return place, self._pieces[places[place], index]


def work(
    queries: Sets, keys: Sets, pairings: Sequence[tuple[np.ndarray, np.ndarray] | None], stride: int, reach: Reach
) -> Work:
    """Compute the work of every round.

    Args:
        queries, keys: sets to pair.
        pairings: per round, the indices of every place's queries and keys; None if nothing is computed.
        stride, reach: as in ``tiles``.
    """
    computed = np.array([index for index, pairing in enumerate(pairings) if pairing is not None])
    q, k = np.array([pairing for pairing in pairings if pairing is not None]).swapaxes(0, 1)  # [rounds, places]
    found = Work(*np.zeros((3, len(pairings), q.shape[1]), dtype=np.int64))
    known: Known = {}
    few = max(1, AT_ONCE // (q.shape[1] * max(queries.most, keys.most)))
    for start in range(0, len(computed), few):
        rounds = slice(start, start + few)
        counts = _counts(
            queries.at(q[rounds].ravel()), keys.at(k[rounds].ravel()), q[rounds].size, stride, reach, known
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
    """Return pairs, tiles and hidden pairs of each place, int64 ``[3, places]``; adds to ``known`` what is new."""
    found = np.zeros((3, places), dtype=np.int64)
    for place, q, k in _groups(queries, keys):
        patterns = np.ascontiguousarray(_patterns(q, k, stride, reach))
        rows = patterns.view(np.dtype((np.void, patterns.itemsize * patterns.shape[1]))).ravel()
        kinds, first, which = np.unique(rows, return_index=True, return_inverse=True)
        names = [(q.shape[1], k.shape[1], kind.tobytes()) for kind in kinds]
        for name, group in zip(names, first, strict=True):
            if name not in known:
                made = tiles(_as_pieces(q[group]), _as_pieces(k[group]), stride, reach)
                known[name] = sum(tile.pairs for tile in made), len(made), sum(tile.hidden for tile in made)
        counts = np.array([known[name] for name in names])[which]
        for total, count in zip(found, counts.T, strict=True):
            np.add.at(total, place, count)
    return found


def _as_pieces(rows: np.ndarray) -> list[Piece]:
    return [Piece(*row) for row in rows.tolist()]


def _groups(
    queries: tuple[np.ndarray, np.ndarray], keys: tuple[np.ndarray, np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield place ``[groups]``, queries ``[groups, m, 4]`` and keys ``[groups, n, 4]`` for each m and n there are."""
    (q_place, q), (k_place, k) = queries, keys
    documents = 1 + max(q[:, DOCUMENT].max(initial=0), k[:, DOCUMENT].max(initial=0))
    q_name, q_first, q_count = _runs(q_place * documents + q[:, DOCUMENT])
    k_name, k_first, k_count = _runs(k_place * documents + k[:, DOCUMENT])
    found = np.minimum(np.searchsorted(k_name, q_name), max(0, len(k_name) - 1))
    shared = np.flatnonzero(k_name[found] == q_name) if len(k_name) else found[:0]
    place, found = q_name[shared] // documents, found[shared]
    q_first, q_count, k_first, k_count = q_first[shared], q_count[shared], k_first[found], k_count[found]
    sizes = q_count * (len(k) + 1) + k_count
    for size in np.unique(sizes):
        (chosen,) = np.nonzero(sizes == size)
        m, n = q_count[chosen[0]], k_count[chosen[0]]
        yield place[chosen], q[q_first[chosen, None] + np.arange(m)], k[k_first[chosen, None] + np.arange(n)]


def _runs(names: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct ones of ascending ``names``, where each starts and how often it stands."""
    first = np.flatnonzero(np.diff(names, prepend=-1))
    return names[first], first, np.diff(first, append=len(names))


def _patterns(q: np.ndarray, k: np.ndarray, stride: int, reach: Reach) -> np.ndarray:
    """Return int64 ``[groups, numbers]``, equal rows for equal tiles.

    The numbers are the lengths, the offsets from the first piece, and the first and last key that the first query of a
    piece sees of each piece of keys, as in ``tiles``; they differ from those only where all or nothing is seen.
    """
    rows, columns = q[:, :, None, LENGTH], k[:, None, :, LENGTH]  # [groups, m, n] together
    distance = q[:, :, None, START] - k[:, None, :, START]
    behind, ahead = reach
    last = columns if ahead is None else (distance + ahead) // stride
    first = -rows if behind is None else -((behind - distance) // stride)
    edges = [np.broadcast_to(np.clip(edge, -rows, columns), distance.shape) for edge in (first, last)]
    shapes = [x for side in (q, k) for x in (side[:, :, LENGTH], side[:, :, OFFSET] - side[:, :1, OFFSET])]
    return np.concatenate([x.reshape(len(q), -1) for x in (*edges, *shapes)], axis=1)
