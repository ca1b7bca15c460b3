"""Beads and circles: packed documents divided over places, stored as columns of numbers.

A bead is a piece of a document along which the work of a token is an arithmetic progression. So the
work of any stretch of tokens is a sum of a few squares, and no array is as long as the sequence. A
place is a rank, or a team of ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Beads(NamedTuple):
    """Pieces of documents, as columns int64 ``[beads]``; token n has work first + n * slope."""

    start: np.ndarray  # position of the bead's first token in the sequence
    length: np.ndarray
    first: np.ndarray
    slope: np.ndarray
    document: np.ndarray  # -1: padding, which has no work

    def take(self, index: np.ndarray) -> "Beads":
        """Return the beads at ``index``, in that order."""
        return Beads(*(field[index] for field in self))

    def work(self, count: np.ndarray) -> np.ndarray:
        """Return the work of the first ``count`` tokens of each bead."""
        return progression(self.first, self.slope, count)


def progression(first: np.ndarray, slope: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Sum the first ``count`` numbers of first, first + slope, first + 2 * slope, ..."""
    return count * first + slope * (count * (count - 1) // 2)


@dataclass(frozen=True)
class Circles:
    """Circles, one after the other on a line, in the order of their places.

    Every place gets ``tokens`` tokens. The tokens of a document that are left on a circle are
    adjacent and in ascending order, even if an arc between them was cut out.
    """

    beads: Beads
    counts: np.ndarray  # number of beads of each circle: int64 [circles]
    num_places: np.ndarray  # number of places of each circle: int64 [circles]
    tokens: int

    @cached_property
    def begin(self) -> np.ndarray:
        """Start position of each bead on the line."""
        return np.cumsum(self.beads.length) - self.beads.length

    @cached_property
    def before(self) -> np.ndarray:
        """Work before each bead on the line and, last, the total: int64 ``[beads + 1]``."""
        return np.append(0, np.cumsum(self.beads.work(self.beads.length)))

    @cached_property
    def circle(self) -> np.ndarray:
        """Index of the circle of each bead."""
        return np.repeat(np.arange(len(self.num_places)), self.counts)

    @cached_property
    def opening(self) -> np.ndarray:
        """Index of the first bead of each circle."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def base(self) -> np.ndarray:
        """Start position of each circle on the line."""
        return np.cumsum(self.size) - self.size

    @cached_property
    def size(self) -> np.ndarray:
        """Number of tokens of each circle."""
        return self.num_places * self.tokens

    @cached_property
    def work(self) -> np.ndarray:
        """Total work of each circle."""
        return self.before[self.opening + self.counts] - self.before[self.opening]

    def target(self, inside: np.ndarray) -> np.ndarray:
        """Return the work that ``inside`` of each circle's places should get, rounded down."""
        quotient, remainder = np.divmod(self.work, self.num_places)
        return inside * quotient + inside * remainder // self.num_places

    def take(self, index: np.ndarray) -> "Circles":
        """Return the circles at ``index``, which must ascend."""
        beads = self.beads.take(np.flatnonzero(np.isin(self.circle, index)))
        return Circles(beads, self.counts[index], self.num_places[index], self.tokens)
