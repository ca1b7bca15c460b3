"""Orders of documents on the circle: any is in balance, and some cut at better points than others."""

from typing import NamedTuple

import numpy as np

from parallel.context.arcs.circles import Beads, Circles, halve
from parallel.context.sparse.rows import Line, union
from parallel.context.sparse.visible import Pieces, Seen, rows_seen

MOST_BEADS = 8_000
"""Documents in all orders that are tried together: above, fewer orders are. A thousand take about a millisecond."""


class Packing(NamedTuple):
    """Tokens to divide among ``places``: documents, and padding up to ``seq_len``."""

    documents: np.ndarray  # cumulative lengths: int64 [documents + 1]
    seq_len: int
    places: int
    reach: tuple[int, int]  # how many tokens before and behind itself a token sees at most


def orders(lengths: np.ndarray) -> list[np.ndarray]:
    """Return permutations of documents: as given, shortest first, longest in the middle, and mixed.

    Up to three documents have one order on a circle, but for its direction.
    """
    count = len(lengths)
    rising = np.argsort(lengths, kind="stable")
    golden = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
    found = [
        np.arange(count),
        rising,
        np.concatenate([rising[0::2], rising[1::2][::-1]]),
        np.argsort(golden, kind="stable"),
    ]
    return found[: max(1, MOST_BEADS // count)] if count > 3 else found[:1]


def opened(documents: np.ndarray, seq_len: int, reach: tuple[int, int]) -> Beads:
    """Return the documents ``[count + 1]``, cumulative, as beads, and padding up to ``seq_len`` as a last one.

    A token sees ``min(n, left)`` before it, if it is the n-th from 0, itself, and ``min(length - 1 - n, right)``
    behind it. So beads also end where one of these becomes constant, or ceases to be.
    """
    left, right = reach
    start, length = documents[:-1, None], np.diff(documents)[:, None]
    falls = np.maximum(length - 1 - right, 0) if right else length  # the first that sees less behind it than before
    begin = np.sort(np.concatenate([np.zeros_like(length), np.minimum(left, length), falls], axis=1), axis=1)
    end = np.concatenate([begin[:, 1:], length], axis=1)
    first = np.minimum(begin, left) + 1 + np.minimum(length - 1 - begin, right)
    slope = (begin < left).astype(np.int64) - (begin >= falls)
    document = np.broadcast_to(np.arange(len(length))[:, None], begin.shape)
    some = begin < end
    beads = Beads((start + begin)[some], (end - begin)[some], first[some], slope[some], document[some])
    padding = Beads(*np.array([[documents[-1]], [seq_len - documents[-1]], [0], [0], [-1]]))
    return Beads(*map(np.append, beads, padding)) if seq_len > documents[-1] else beads


def divided(packing: Packing, permutations: list[np.ndarray]) -> Circles:
    """Put the documents on a circle in each of the orders, and halve all circles until each is of one place.

    Returns the places' circles, those of one order after the other.
    """
    documents, seq_len, places, reach = packing
    beads = opened(documents, seq_len, reach)
    index = []
    for permutation in permutations:
        ordinal = np.full(len(documents), len(permutation))  # padding, document -1, comes last
        ordinal[permutation] = np.arange(len(permutation))
        index.append(np.argsort(ordinal[beads.document], kind="stable"))
    shape = np.ones(len(index), dtype=np.int64)
    circles = Circles(beads.take(np.concatenate(index)), shape * len(beads.start), shape * places, seq_len // places)
    share = circles.work[0] / places
    while circles.places.max() > 1:
        _, circles = halve(circles, share, reach)
    return circles


def best(packing: Packing) -> Pieces:
    """Return what each place holds, padding too, of the best order of documents.

    It is the order under which the busiest place receives or sends the fewest rows; the first of equal ones.
    """
    permutations = orders(np.diff(packing.documents))
    pieces, chosen = _joined(divided(packing, permutations)), 0
    if len(permutations) > 1:
        chosen = int(np.argmin(_busiest(pieces, packing, len(permutations))))
    own = pieces.take(np.flatnonzero(pieces.place // packing.places == chosen))
    own = own._replace(place=own.place % packing.places)
    return own.take(np.argsort(own.place * packing.seq_len + own.start))


def _joined(circles: Circles) -> Pieces:
    """Return the beads of each place, those of a document joined that touch."""
    place, (start, length, _, _, document) = circles.circle, circles.beads
    apart = (place[1:] != place[:-1]) | (document[1:] != document[:-1]) | (start[1:] != (start + length)[:-1])
    heads = np.flatnonzero(np.append(True, apart))
    return Pieces(place[heads], start[heads], np.add.reduceat(length, heads), document[heads], start[heads])


def _busiest(pieces: Pieces, packing: Packing, count: int) -> np.ndarray:
    """Return the most rows that a place receives or sends, for each of ``count`` orders."""
    pieces, places = in_parts(pieces, packing.documents), count * packing.places
    order = pieces.place // packing.places
    rows = travelling(pieces._replace(document=pieces.document + order * len(packing.documents)), places, packing)
    sums = [np.bincount(side, rows.end - rows.first, places) for side in (rows.whose, rows.who)]
    return np.maximum(*sums).reshape(count, -1).max(axis=1)


def in_parts(pieces: Pieces, documents: np.ndarray) -> Pieces:
    """Return the pieces of documents that several places share: only their rows travel."""
    shared = (pieces.document >= 0) & (pieces.length < np.diff(documents)[pieces.document])
    return pieces.take(np.flatnonzero(shared))


def travelling(pieces: Pieces, places: int, packing: Packing) -> Seen:
    """Return the rows that places see and others hold, each once, ascending by reader, owner and position."""
    rows, line = rows_seen(pieces, pieces, 1, packing.reach), Line(places, packing.seq_len)
    return line.rows(union(line.spans(*rows).where(rows.who != rows.whose)))
