"""Packed documents over ranks: the same tokens and the same work for each, and as few documents cut
as can be.

    Put all documents on a circle. Let an arc of half the tokens move once round. Every token is in
    it for half of the way, so on average it holds half of the work: more here, less there, and
    exactly half somewhere between. Cut there. Close the arc to a circle for one half of the ranks,
    and what is left to another for the other half. Repeat.

A circle takes two cuts, so P ranks take at most 2 (P - 1), however many documents there are. Any
other share works as well: an odd number k of ranks takes an arc of k // 2 parts in k of the tokens,
which holds as much of the work somewhere. Tokens and work are two additive measures, and this is
necklace splitting: Stromquist and Woodall, "Sets on which several measures agree" (1985), for one
arc of any share; Alon, "Splitting necklaces" (1987), for the bound.

The documents are the beads. The work of a token is the number of keys that it sees, and along a
bead this is an arithmetic progression: 1, 2, 3, ... under a causal mask; a document that fills its
window is a bead of 1, 2, ..., w and one of w, w, ... So the work of an arc is a sum of a few
squares. While neither end of the arc reaches another bead its change is linear, or quadratic, and
solved at once. Where several arcs hold their share, the cheapest is cut.

All circles lie one after the other on a line, each opened at an edge between documents, and one
pass of numpy halves them all. Decisions are made on integers, or on bounds computed in one order:
all ranks and machines find the same.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

TOLERANCE = 0.003
"""Share of its work by which a place may have too much or too little, so that cuts fall on edges of
documents.
"""


class Beads(NamedTuple):
    """Pieces of documents: int64 ``[beads]`` each. Token n of a bead has work ``first + n *
    slope``.
    """

    start: np.ndarray  # its first token's position in the sequence
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
    """Return the sum of the first ``count`` of ``first``, ``first + slope``, ``first + 2 * slope``,
    ...
    """
    return count * first + slope * (count * (count - 1) // 2)


@dataclass(frozen=True)
class Circles:
    """Circles on a line, in the order of the places that they are for; a circle has ``tokens`` for
    each of its places.

    A document's tokens lie side by side on a circle and ascend, whatever was cut out between them.
    """

    beads: Beads
    counts: np.ndarray  # beads of each circle: int64 [circles]
    places: np.ndarray  # that share each circle, ranks or teams of them: int64 [circles]
    tokens: int

    @cached_property
    def begin(self) -> np.ndarray:
        """Return where each bead begins on the line."""
        return np.cumsum(self.beads.length) - self.beads.length

    @cached_property
    def before(self) -> np.ndarray:
        """Return the work before each bead on the line, and of the whole line: ``[beads + 1]``."""
        return np.append(0, np.cumsum(self.beads.work(self.beads.length)))

    @cached_property
    def circle(self) -> np.ndarray:
        """Return each bead's circle."""
        return np.repeat(np.arange(len(self.places)), self.counts)

    @cached_property
    def opening(self) -> np.ndarray:
        """Return the first bead of each circle."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def base(self) -> np.ndarray:
        """Return where each circle begins on the line."""
        return np.cumsum(self.size) - self.size

    @cached_property
    def size(self) -> np.ndarray:
        """Return the tokens of each circle."""
        return self.places * self.tokens

    @cached_property
    def work(self) -> np.ndarray:
        """Return the work of each circle."""
        return self.before[self.opening + self.counts] - self.before[self.opening]

    def target(self, inside: np.ndarray) -> np.ndarray:
        """Return the share of ``inside`` of its places in each circle's work, rounded down."""
        whole, rest = np.divmod(self.work, self.places)
        return inside * whole + inside * rest // self.places

    def take(self, index: np.ndarray) -> "Circles":
        """Return the circles at ``index``, which ascends."""
        beads = self.beads.take(np.flatnonzero(np.isin(self.circle, index)))
        return Circles(beads, self.counts[index], self.places[index], self.tokens)


class Arcs(NamedTuple):
    """Arcs somewhere on their circles, and what they hold there: int64 ``[arcs]`` each.

    ``n`` tokens further on, up to ``room``, the surplus is ``surplus + n * gain + n * (n - 1) / 2 *
    bend``.
    """

    circle: np.ndarray
    at: np.ndarray  # where the arc begins on the line
    head: np.ndarray  # bead of its first token
    tail: np.ndarray  # bead of the first token behind it, or the one that ends there
    surplus: np.ndarray  # work of the arc beyond its share
    gain: np.ndarray
    bend: np.ndarray
    room: np.ndarray

    def take(self, index: np.ndarray) -> "Arcs":
        """Return the arcs at ``index``."""
        return Arcs(*(field[index] for field in self))

    def on(self, steps: np.ndarray) -> "Arcs":
        """Return the arcs moved on by ``steps`` tokens each."""
        return self._replace(
            at=self.at + steps,
            surplus=self.surplus + steps * self.gain + self.bend * (steps * (steps - 1) // 2),
            gain=self.gain + steps * self.bend,
            room=self.room - steps,
        )


def halve(circles: Circles, share: float, reach: tuple[int, int]) -> tuple[np.ndarray, Circles]:
    """Cut every circle into two arcs, and close each to a circle.

    Args:
        circles: for any numbers of places; those of one place stay as they are.
        share: work of a place where all have the same.
        reach: how many tokens before and behind itself a token sees at most.

    Returns:
        where each circle is cut, in tokens from its beginning: int64 ``[circles, 2]``, ascending;
        and the circles, for each of them what lies outside the two cuts and then what lies between.
    """
    larger, odd = (
        (circles.places + 1) // 2,
        np.flatnonzero(circles.places % 2 * (circles.places > 1)),
    )
    cuts, cost = cheapest(circles, larger, share, reach)
    if len(
        odd
    ):  # what the larger arcs leave lies across the line's end: smaller arcs that do not are still to be seen
        other, least = cheapest(circles.take(odd), circles.places[odd] // 2, share, reach)
        cuts[odd] = np.where((least < cost[odd])[:, None], other, cuts[odd])
    return cuts, split(circles, cuts + circles.base[:, None])


def cheapest(
    circles: Circles, inside: np.ndarray, share: float, reach: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Find the arc of each circle that holds the share of work of ``inside`` places and moves the
    fewest rows.

    Returns:
        both ends of each arc, in tokens from its circle's beginning: int64 ``[circles, 2]``, the
        first of equal arcs; and the rows, int64 ``[circles]``, of which a circle without such an
        arc has the largest integer.
    """
    stops = turn(circles, inside)
    found = (on_edges(circles, stops, inside, share), crossings(stops))
    circle, at, head, tail, *_ = (np.concatenate(fields) for fields in zip(*found, strict=True))
    arc = inside * circles.tokens
    ends = rows_across(circles, reach, np.append(head, tail), np.append(at, at + arc[circle]))
    cost = ends[: len(at)] + ends[len(at) :]
    least, first = np.full(len(inside), np.iinfo(np.int64).max), circles.size.copy()
    np.minimum.at(least, circle, cost)
    best = np.flatnonzero(cost == least[circle])
    np.minimum.at(first, circle[best], (at - circles.base[circle])[best])
    return np.stack([first, first + arc], axis=1), least


def turn(circles: Circles, inside: np.ndarray) -> Arcs:
    """Move an arc for ``inside`` places along every circle, and stop where either end reaches the
    edge of a bead.

    It stops also where its surplus turns from rising to falling or back, so that it does not
    between two stops. It goes from the beginning of its circle's line to the end: an arc across the
    end is what another arc leaves.
    """
    beads, begin, circle, base = circles.beads, circles.begin, circles.circle, circles.base
    arc = inside * circles.tokens
    heads = np.flatnonzero(begin <= (base + circles.size - arc)[circle])
    tails = np.flatnonzero(begin >= (base + arc)[circle])
    stops = np.append(begin[heads], begin[tails] - arc[circle[tails]])
    order = np.argsort(stops, kind="stable")
    at, passed = stops[order], np.cumsum(order < len(heads))
    head = heads[passed - 1]
    circle = circle[head]
    # At every other stop the tail reaches its next bead, from the bead in which the line's first
    # arc ends.
    onto = begin.searchsorted(base + arc)
    tail = np.arange(1, len(at) + 1) - passed + (onto - 1 - tails.searchsorted(onto))[circle]
    into, onto = at - begin[head], at + arc[circle] - begin[tail]
    leaves, leaving, enters, entering = (
        beads.first[head],
        beads.slope[head],
        beads.first[tail],
        beads.slope[tail],
    )
    held = circles.before[tail] - circles.before[head]
    held += progression(enters, entering, onto) - progression(leaves, leaving, into)
    surplus = held - circles.target(inside)[circle]
    gain = enters + entering * onto - leaves - leaving * into
    room = np.append(at[1:], 0) - at
    last = np.append(np.flatnonzero(circle[1:] != circle[:-1]), len(at) - 1)
    room[last] = (base + circles.size - arc) - at[last]
    return _with_extrema(Arcs(circle, at, head, tail, surplus, gain, entering - leaving, room))


def _with_extrema(arcs: Arcs) -> Arcs:
    """Stop also where the surplus is largest or smallest between two stops."""
    turns = np.flatnonzero(arcs.bend)
    steps = -(
        arcs.gain[turns] // arcs.bend[turns]
    )  # the first step on which the gain has another sign, or none
    inner = (steps > 0) & (steps < arcs.room[turns])
    turns, steps = turns[inner], steps[inner]
    after = arcs.take(turns).on(steps)
    arcs.room[turns] = steps
    return (
        Arcs(*(np.concatenate(fields) for fields in zip(arcs, after, strict=True)))
        if len(turns)
        else arcs
    )


def crossings(arcs: Arcs) -> Arcs:
    """Return the arcs between two stops that are nearest to their share of work, wherever the
    surplus changes sign.
    """
    ahead = arcs.surplus + arcs.room * arcs.gain + arcs.bend * (arcs.room * (arcs.room - 1) // 2)
    arcs = arcs.take(np.flatnonzero((arcs.surplus <= 0) != (ahead <= 0)))
    # The root of surplus + speed * n + bend / 2 * n^2 that comes first, written so that nothing
    # cancels.
    speed, sign = arcs.gain - arcs.bend / 2, np.where(arcs.surplus > 0, -1.0, 1.0)
    width = np.sqrt(np.maximum(speed * speed - 2.0 * arcs.bend * arcs.surplus, 0.0))
    root = 2.0 * np.abs(arcs.surplus) / np.maximum(sign * speed + width, 1e-9)
    short = arcs.on(np.clip(np.floor(root), 0, arcs.room - 1).astype(np.int64))
    return short.on((np.abs(short.surplus + short.gain) < np.abs(short.surplus)).astype(np.int64))


def on_edges(circles: Circles, arcs: Arcs, inside: np.ndarray, share: float) -> Arcs:
    """Return the stops at which both parts of a circle hold their places' shares of work, within
    the tolerance.
    """
    own, others, target = inside * share, (circles.places - inside) * share, circles.target(inside)
    least = np.maximum(own * (1 - TOLERANCE), circles.work - others * (1 + TOLERANCE)) - target
    most = np.minimum(own * (1 + TOLERANCE), circles.work - others * (1 - TOLERANCE)) - target
    near = (arcs.surplus >= least[arcs.circle]) & (arcs.surplus <= most[arcs.circle])
    return arcs.take(np.flatnonzero(near | (arcs.surplus == 0)))


def rows_across(
    circles: Circles, reach: tuple[int, int], bead: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """Return how many rows travel because of cuts at ``at``, in ``bead`` or at its end: an
    estimate.

    What lies behind a cut in its document goes to as many places as it fills, and each reads the
    rows before the cut.
    """
    beads, tokens = circles.beads, circles.tokens
    gap = (
        beads.start[1:] - beads.start[:-1] - beads.length[:-1]
    )  # cut out already; a wide one hides all before it
    joined = np.append(False, (beads.document[1:] == beads.document[:-1]) & (gap < max(reach)))
    joined[circles.opening] = False
    edges = np.append(circles.begin[~joined], circles.begin[-1] + beads.length[-1])
    stretch = (np.cumsum(~joined) - 1)[bead]
    before, behind = at - edges[stretch], edges[stretch + 1] - at
    left, right = reach
    found = np.minimum(before, left) * -(-np.minimum(behind, left) // tokens)
    if right:
        found += np.minimum(behind, right) * -(-np.minimum(before, right) // tokens)
    return np.where(beads.document[bead] < 0, 0, found)


def split(circles: Circles, cuts: np.ndarray) -> Circles:
    """Return the circles of what lies outside and between the two cuts of each circle, without
    empty ones.
    """
    beads, begin = circles.beads, circles.begin
    hit = begin.searchsorted(cuts.ravel(), "right") - 1
    offset = cuts.ravel() - begin[hit]
    new = (offset > 0) & (offset < beads.length[hit])
    source = np.repeat(np.arange(len(begin)), 1 + np.bincount(hit[new], minlength=len(begin)))
    at = np.sort(np.concatenate([begin, cuts.ravel()[new]]), kind="stable")
    length = np.diff(at, append=begin[-1] + beads.length[-1])
    circle, within, (low, high) = circles.circle[source], at - begin[source], cuts.T.copy()
    part = 2 * circle + ((at >= low[circle]) & (at < high[circle]))
    order = np.argsort(part, kind="stable")
    source, within = source[order], within[order]
    pieces = beads.take(source)
    pieces = pieces._replace(
        start=pieces.start + within,
        length=length[order],
        first=pieces.first + within * pieces.slope,
    )
    counts = np.bincount(part, minlength=2 * len(circles.places))
    inside = (high - low) // circles.tokens
    places = np.stack([circles.places - inside, inside], axis=1).ravel()
    return Circles(pieces, counts[places > 0], places[places > 0], circles.tokens)
