"""Divide packed documents over ranks: equal numbers of tokens, equal work, few documents cut.

Put all documents on a circle. Let an arc of half the tokens move once around it. Every token is in
the arc for half of the way, so on average the arc holds half of the work: more here, less there,
and exactly half somewhere between. Cut there. Close the arc to a circle for one half of the ranks,
and the rest to another circle for the other half. Repeat.

A circle takes two cuts, so P ranks take at most 2 (P - 1), however many documents there are. Any
other share works as well: an odd number k of ranks takes an arc of k // 2 parts in k of the tokens,
which holds as much of the work somewhere. Tokens and work are two additive measures, and this is
necklace splitting: Stromquist and Woodall, "Sets on which several measures agree" (1985), for one
arc of any share; Alon, "Splitting necklaces" (1987), for the bound.

The beads of the necklace are documents, or parts of them. The work of a token is the number of keys
that it sees, and along a bead this is an arithmetic progression: 1, 2, 3, ... under a causal mask;
a document longer than its window w has a bead of 1, 2, ..., w and one of w, w, ... While neither
end of the arc reaches another bead, the arc's work changes linearly or quadratically, so the cut is
found by a formula. If several arcs hold their share, the cheapest is cut.

All circles lie one after the other on a line, each opened at an edge between documents, and one
pass of numpy halves them all. Every rank computes the layout for itself, and a rank that found
another cut would send rows that no other rank expects. So decisions are made on integers, or on
bounds computed in a fixed order: all ranks and machines get the same layout.
"""

from typing import NamedTuple

import numpy as np

from parallel.context.sparse.beads import Circles, progression

TOLERANCE = 0.003
"""Fraction by which a place's work may differ from its share, so that cuts can fall on document
boundaries.
"""


class Arcs(NamedTuple):
    """Arcs, each at a position on its circle, with its work there: int64 ``[arcs]`` per field.

    After moving on by ``n`` tokens, up to ``room`` (the distance to the next stop, see ``turn``),
    the surplus is ``surplus + n * gain + n * (n - 1) / 2 * bend``.
    """

    circle: np.ndarray
    start: np.ndarray  # position on the line
    head: np.ndarray  # bead that contains the arc's first token
    # bead of the first token after the arc; if the arc ends with a bead, it may still be that bead
    tail: np.ndarray
    surplus: np.ndarray  # work of the arc in excess of its share
    gain: np.ndarray
    bend: np.ndarray
    room: np.ndarray

    def take(self, index: np.ndarray) -> "Arcs":
        """Return the arcs at ``index``."""
        return Arcs(*(field[index] for field in self))

    def on(self, steps: np.ndarray) -> "Arcs":
        """Return the arcs moved on by ``steps`` tokens each."""
        return self._replace(
            start=self.start + steps,
            surplus=self._surplus_after(steps),
            gain=self.gain + steps * self.bend,
            room=self.room - steps,
        )

    def surplus_at_end(self) -> np.ndarray:
        """Return the surplus after ``room`` tokens."""
        return self._surplus_after(self.room)

    def _surplus_after(self, steps: np.ndarray) -> np.ndarray:
        return self.surplus + steps * self.gain + self.bend * (steps * (steps - 1) // 2)


def joined(*several: Arcs) -> Arcs:
    """Concatenate arcs."""
    return Arcs(*(np.concatenate(fields) for fields in zip(*several, strict=True)))


def halve(circles: Circles, share: float, reach: tuple[int, int]) -> tuple[np.ndarray, Circles]:
    """Cut every circle into two arcs, and close each arc to a circle.

    Args:
        circles: circles for any numbers of places; a circle for one place stays as it is.
        share: work of a place if all places have the same work.
        reach: maximum numbers of tokens that a token sees before and after itself.

    Returns:
        the two cuts of each circle, in tokens from its beginning: int64 ``[circles, 2]``,
        ascending; and the new circles: for each old circle the part outside the two cuts, then the
        part between them.
    """
    num_places = circles.num_places
    larger_half = (num_places + 1) // 2
    cuts, cost = cheapest(circles, larger_half, share, reach)

    # Arcs do not cross the end of the line. With an even number of places, an arc that crosses it
    # is the complement of one that does not. With an odd number, the complement of a larger half is
    # a smaller half, so try the smaller halves too.
    odd = np.flatnonzero(num_places % 2 * (num_places > 1))
    if len(odd):
        other_cuts, other_cost = cheapest(circles.take(odd), num_places[odd] // 2, share, reach)
        is_cheaper = other_cost < cost[odd]
        cuts[odd] = np.where(is_cheaper[:, None], other_cuts, cuts[odd])
    return cuts, split(circles, cuts + circles.base[:, None])


def cheapest(
    circles: Circles, inside: np.ndarray, share: float, reach: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Find each circle's arc for ``inside`` places that moves the fewest rows.

    The arcs have the tokens and the share of work of that many places.

    Returns:
        both ends of each arc, in tokens from its circle's beginning: int64 ``[circles, 2]``; if
        arcs are equally good, the first one. And the number of rows that each arc moves, int64
        ``[circles]``: the largest integer for a circle without such an arc.
    """
    stops = turn(circles, inside)
    arcs = joined(on_edges(circles, stops, inside, share), crossings(stops))
    circle = arcs.circle
    arc_length = inside * circles.tokens
    edge_beads = np.append(arcs.head, arcs.tail)
    edges = np.append(arcs.start, arcs.start + arc_length[circle])

    head_rows, tail_rows = rows_across(circles, reach, edge_beads, edges).reshape(2, -1)
    cost = head_rows + tail_rows

    min_cost = np.full(len(inside), np.iinfo(np.int64).max)
    np.minimum.at(min_cost, circle, cost)

    best = np.flatnonzero(cost == min_cost[circle])
    first = circles.size.copy()
    np.minimum.at(first, circle[best], (arcs.start - circles.base[circle])[best])
    return np.stack([first, first + arc_length], axis=1), min_cost


def turn(circles: Circles, inside: np.ndarray) -> Arcs:
    """Move an arc for ``inside`` places along every circle; return the positions where it stops.

    An arc stops where one of its ends reaches the edge of a bead, and where its surplus turns from
    rising to falling or back. So between two stops the surplus only rises or only falls. The arc
    moves from the beginning of its circle's line to the end, and not across the end, because an arc
    across the end is the complement of another arc.
    """
    beads = circles.beads
    begin = circles.begin
    base = circles.base
    arc_length = inside * circles.tokens
    last_start = base + circles.size - arc_length
    first_end = base + arc_length

    heads = np.flatnonzero(begin <= last_start[circles.circle])
    tails = np.flatnonzero(begin >= first_end[circles.circle])

    # Sort the stops of both ends. For each, count the head's stops so far, itself included.
    stops = np.append(begin[heads], begin[tails] - arc_length[circles.circle[tails]])
    order = np.argsort(stops, kind="stable")
    start = stops[order]
    num_heads = np.cumsum(order < len(heads))
    head = heads[num_heads - 1]
    circle = circles.circle[head]

    # At all other stops the arc's tail reaches its next bead. The tail starts in the bead in which
    # the circle's first arc ends.
    first_tail = begin.searchsorted(first_end)
    num_tails = np.arange(1, len(start) + 1) - num_heads
    tail = num_tails + (first_tail - 1 - tails.searchsorted(first_tail))[circle]

    into_head = start - begin[head]
    into_tail = start + arc_length[circle] - begin[tail]
    head_first = beads.first[head]
    head_slope = beads.slope[head]
    tail_first = beads.first[tail]
    tail_slope = beads.slope[tail]

    # Add the work of whole beads, and of the parts of the two beads that contain the arc's ends.
    work = circles.before[tail] - circles.before[head]
    work += progression(tail_first, tail_slope, into_tail)
    work -= progression(head_first, head_slope, into_head)

    # Moving by one token adds the tail's next token and drops the head's first token.
    gain = tail_first + tail_slope * into_tail - head_first - head_slope * into_head
    room = np.append(start[1:], 0) - start

    # From the last stop of a circle, the arc can move to the end of the circle's line.
    last = np.append(np.flatnonzero(circle[1:] != circle[:-1]), len(start) - 1)
    room[last] = last_start - start[last]
    arcs = Arcs(
        circle=circle,
        start=start,
        head=head,
        tail=tail,
        surplus=work - circles.target(inside)[circle],
        gain=gain,
        bend=tail_slope - head_slope,
        room=room,
    )
    return _with_extrema(arcs)


def _with_extrema(arcs: Arcs) -> Arcs:
    """Add stops at which the surplus is largest or smallest between two stops."""
    turns = np.flatnonzero(arcs.bend)
    # First step at which the gain is zero or has another sign.
    steps = -(arcs.gain[turns] // arcs.bend[turns])

    is_between = (steps > 0) & (steps < arcs.room[turns])
    turns = turns[is_between]
    steps = steps[is_between]

    after = arcs.take(turns).on(steps)
    arcs.room[turns] = steps
    return joined(arcs, after) if len(turns) else arcs


def crossings(arcs: Arcs) -> Arcs:
    """Return the arcs nearest to their share of work: one for each change of the surplus's sign.

    These arcs lie between two stops.
    """
    arcs = arcs.take(np.flatnonzero((arcs.surplus <= 0) != (arcs.surplus_at_end() <= 0)))
    # Take the first root of surplus + speed * n + bend / 2 * n^2, in a form without cancellation.
    speed = arcs.gain - arcs.bend / 2
    sign = np.where(arcs.surplus > 0, -1.0, 1.0)
    discriminant = speed * speed - 2.0 * arcs.bend * arcs.surplus
    width = np.sqrt(np.maximum(discriminant, 0.0))
    root = 2.0 * np.abs(arcs.surplus) / np.maximum(sign * speed + width, 1e-9)

    steps = np.clip(np.floor(root), 0, arcs.room - 1).astype(np.int64)
    before = arcs.on(steps)
    next_is_nearer = np.abs(before.surplus + before.gain) < np.abs(before.surplus)
    return before.on(next_is_nearer.astype(np.int64))


def on_edges(circles: Circles, arcs: Arcs, inside: np.ndarray, share: float) -> Arcs:
    """Return the stops at which both parts of a circle have nearly their share of work."""
    # Check both parts: the arc may be within its tolerance while the rest of the circle is not.
    inside_share = inside * share
    outside_share = (circles.num_places - inside) * share
    work = circles.work
    min_work = np.maximum(inside_share * (1 - TOLERANCE), work - outside_share * (1 + TOLERANCE))
    max_work = np.minimum(inside_share * (1 + TOLERANCE), work - outside_share * (1 - TOLERANCE))

    target = circles.target(inside)
    min_surplus = min_work - target
    max_surplus = max_work - target
    is_near = arcs.surplus >= min_surplus[arcs.circle]
    is_near &= arcs.surplus <= max_surplus[arcs.circle]
    return arcs.take(np.flatnonzero(is_near | (arcs.surplus == 0)))


def rows_across(
    circles: Circles, reach: tuple[int, int], bead: np.ndarray, cut: np.ndarray
) -> np.ndarray:
    """Estimate the number of rows that travel because of each cut, in ``bead`` or at its end.

    The part of a document after the cut goes to as many places as it fills, and each of these
    places reads the rows before the cut.
    """
    beads = circles.beads
    tokens = circles.tokens
    # Count the tokens that were cut out between two beads of a document: no query sees rows across
    # a gap as wide as the window.
    gap = beads.start[1:] - beads.start[:-1] - beads.length[:-1]

    is_same_document = beads.document[1:] == beads.document[:-1]
    continues = np.append(False, is_same_document & (gap < max(reach)))
    continues[circles.opening] = False

    # Find stretches of consecutive tokens of one document, and the edges between them.
    edges = np.append(circles.begin[~continues], circles.begin[-1] + beads.length[-1])
    stretch = (np.cumsum(~continues) - 1)[bead]

    before = cut - edges[stretch]
    behind = edges[stretch + 1] - cut
    max_before, max_after = reach
    rows = np.minimum(before, max_before) * -(-np.minimum(behind, max_before) // tokens)
    if max_after:
        rows += np.minimum(behind, max_after) * -(-np.minimum(before, max_after) // tokens)
    return np.where(beads.document[bead] < 0, 0, rows)


def split(circles: Circles, cuts: np.ndarray) -> Circles:
    """Return the circles outside and between the two cuts of each circle, without empty ones."""
    beads = circles.beads
    begin = circles.begin

    # Split the beads that contain a cut.
    cut_bead = begin.searchsorted(cuts.ravel(), "right") - 1
    offset = cuts.ravel() - begin[cut_bead]
    is_inside = (offset > 0) & (offset < beads.length[cut_bead])

    num_cuts = np.bincount(cut_bead[is_inside], minlength=len(begin))
    source = np.repeat(np.arange(len(begin)), 1 + num_cuts)
    start = np.sort(np.concatenate([begin, cuts.ravel()[is_inside]]), kind="stable")
    length = np.diff(start, append=begin[-1] + beads.length[-1])

    # Sort by circle; within a circle, the part outside the cuts comes before the part between them.
    circle = circles.circle[source]
    low, high = cuts.T.copy()
    is_between = (start >= low[circle]) & (start < high[circle])
    new_circle = 2 * circle + is_between
    order = np.argsort(new_circle, kind="stable")

    within = (start - begin[source])[order]
    pieces = beads.take(source[order])
    pieces = pieces._replace(
        start=pieces.start + within,
        length=length[order],
        first=pieces.first + within * pieces.slope,
    )

    counts = np.bincount(new_circle, minlength=2 * len(circles.num_places))
    inside = (high - low) // circles.tokens
    num_places = np.stack([circles.num_places - inside, inside], axis=1).ravel()
    is_filled = num_places > 0
    return Circles(pieces, counts[is_filled], num_places[is_filled], circles.tokens)
