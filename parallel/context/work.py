"""Work of all ranks in all rounds, in pairs and tiles. Positions with the same pattern are tiled once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from parallel.context.tiles import Piece, Reach, tiles

NOWHERE = Piece(0, 0, 0, -1)


class Work(NamedTuple):
    """Unmasked (query, key) pairs and tiles: int64 ``[rounds, places]``; a place is a head group of ranks."""

    pairs: np.ndarray
    tiles: np.ndarray


class Sets:
    """Positions of several ranks or groups, as pieces."""

    def __init__(self, members: Sequence[list[Piece]]) -> None:
        self.members = members
        most = max(map(len, members))
        padded = np.array([(*pieces, *[NOWHERE] * (most - len(pieces))) for pieces in members])  # [sets, most, 4]
        self.start, self.length, self.document = padded[..., 0], padded[..., 2], padded[..., 3]
        _, self.shape = np.unique(padded[..., 1:3].reshape(len(members), -1), axis=0, return_inverse=True)


def work(
    queries: Sets, keys: Sets, pairings: Sequence[tuple[np.ndarray, np.ndarray] | None], stride: int, reach: Reach
) -> Work:
    """Compute the work of every round.

    Args:
        queries, keys: sets to pair.
        pairings: per round, the indices of every place's queries and keys; None if nothing is computed.
        stride, reach: as in ``tiles``.
    """
    places = next(len(q) for q, _ in filter(None, pairings))
    found = Work(*np.zeros((2, len(pairings), places), dtype=np.int64))
    known: dict[bytes, tuple[int, int]] = {}
    for index, pairing in enumerate(pairings):
        if pairing is None:
            continue
        kinds = np.ascontiguousarray(_kinds(queries, keys, *pairing, stride, reach))
        rows = kinds.view(np.dtype((np.void, kinds.itemsize * kinds.shape[1]))).ravel()
        kind, first, which = np.unique(rows, return_index=True, return_inverse=True)
        for key, place in zip(kind, first, strict=True):
            if (name := key.tobytes()) not in known:
                q, k = (int(side[place]) for side in pairing)
                made = tiles(queries.members[q], keys.members[k], stride, reach)
                known[name] = sum(tile.pairs for tile in made), len(made)
        found.pairs[index], found.tiles[index] = np.array([known[key.tobytes()] for key in kind]).T[:, which]
    return found


def _kinds(queries: Sets, keys: Sets, q: np.ndarray, k: np.ndarray, stride: int, reach: Reach) -> np.ndarray:
    """Return int64 ``[places, numbers]``, equal rows for equal tiles.

    The numbers are the lengths and offsets, and the first and last key that the first query of each piece sees of each
    piece of keys, as in ``tiles``; they differ from those only where all or nothing is seen.
    """
    rows, columns = queries.length[q][:, :, None], keys.length[k][:, None, :]  # [places, pieces, pieces]
    distance = queries.start[q][:, :, None] - keys.start[k][:, None, :]
    behind, ahead = reach
    last = columns if ahead is None else (distance + ahead) // stride
    first = -rows if behind is None else -((behind - distance) // stride)
    document = queries.document[q][:, :, None]
    together = (document == keys.document[k][:, None, :]) & (document >= 0)
    numbers = (np.where(together, np.clip(edge, -rows, columns), -rows) for edge in (first, last))
    shapes = queries.shape[q][:, None], keys.shape[k][:, None]
    return np.concatenate([*shapes, *(edge.reshape(len(q), -1) for edge in numbers)], axis=1)
