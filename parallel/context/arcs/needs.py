"""Which rows travel where: what the queries of each place see, cut by who holds it."""

from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """Pieces of documents and the places that hold them: int64 ``[pieces]`` each, by place, then by start."""

    place: np.ndarray
    start: np.ndarray
    length: np.ndarray
    document: np.ndarray  # -1: padding

    def take(self, index: np.ndarray) -> "Pieces":
        """Return the pieces at ``index``, in that order."""
        return Pieces(*(field[index] for field in self))


class Rows(NamedTuple):
    """Positions ``first .. end - 1``, which ``owner`` holds and ``reader`` sees: int64 ``[ranges]`` each.

    They ascend by reader, then by first. Ranges of a pair neither overlap nor touch.
    """

    owner: np.ndarray
    reader: np.ndarray
    first: np.ndarray
    end: np.ndarray


def groups(count: int, apart: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last members of groups of ``count`` members, where each but the last is apart from
    the next or is not."""
    return np.flatnonzero(np.append(True, apart)[:count]), np.flatnonzero(np.append(apart, True)[:count])


def in_parts(pieces: Pieces, documents: np.ndarray) -> Pieces:
    """Return the pieces of documents that several places share: only their rows travel."""
    shared = (pieces.document >= 0) & (pieces.length < np.diff(documents)[pieces.document])
    return pieces.take(np.flatnonzero(shared))


def seen(pieces: Pieces, documents: np.ndarray, reach: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first position that the queries of each piece see, and the first behind the last.

    Args:
        pieces: of documents.
        documents: cumulative lengths.
        reach: how many tokens before and behind itself a token sees at most.
    """
    low = np.maximum(documents[pieces.document], pieces.start - reach[0])
    return low, np.minimum(documents[pieces.document + 1], pieces.start + pieces.length + reach[1])


def rows_needed(pieces: Pieces, low: np.ndarray, high: np.ndarray) -> Rows:
    """Return the rows that places see and do not hold.

    Args:
        pieces: all pieces of each document that is in several places; others may be left out.
        low, high: the first position that a piece's queries see, and the first behind the last; neither descends from
            one piece of a place to the next.
    """
    place, start, end = pieces.place, pieces.start, pieces.start + pieces.length
    heads, lasts = groups(len(place), (place[1:] != place[:-1]) | (low[1:] > high[:-1]))
    low, high, reader = low[heads], high[lasts], place[heads]
    order = np.argsort(start)
    start, end, place = start[order], end[order], place[order]
    lowest = end.searchsorted(low, "right")
    count = start.searchsorted(high) - lowest
    view = np.repeat(np.arange(len(low)), count)
    piece = np.arange(len(view)) + np.repeat(lowest - np.cumsum(count) + count, count)
    other = place[piece] != reader[view]
    view, piece = view[other], piece[other]
    owner, reader = place[piece], reader[view]
    first, end = np.maximum(start[piece], low[view]), np.minimum(end[piece], high[view])
    heads, lasts = groups(len(owner), (owner[1:] != owner[:-1]) | (reader[1:] != reader[:-1]) | (first[1:] != end[:-1]))
    return Rows(owner[heads], reader[heads], first[heads], end[lasts])
