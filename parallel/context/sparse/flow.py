"""Route rows between ranks: a row travels only to the ranks whose queries see it.

On its way a row may pass through other ranks. A plan's rounds say who holds whose tokens; here each
holder stores only those rows that it or a later holder needs. The gradients that a holder computes
go the same way as long as the next holder stores those rows too; the others go straight to their
owner. The owner adds them in the order of rounds and senders, whatever arrives first. An owner's
own part of the gradient never leaves it.

A *place* is a head group of ranks, as in Geometry. All places are routed at once, on one line of
numbers (``Line``): a send needs the sender's and the receiver's rows, and a rank that computed the
routes of all others one by one would be slower than the attention. A rank's rounds (``schedule``)
are its part of the flow, and its tiles.
"""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np

from parallel.context.geometry import Geometry, Moves
from parallel.context.layout import Reach
from parallel.context.methods.base import Send
from parallel.context.sparse.rows import (
    NOWHERE,
    ByPlace,
    Line,
    Rows,
    Spans,
    as_columns,
    common,
    indices_by_place,
    rows_seen,
    union,
    without,
)
from parallel.context.tiles import Piece
from runtime.tensors import kept_in_object


class Parcel(NamedTuple):
    """Rows that travel together to or from the rank ``peer``.

    ``rows`` are indices in this rank's buffer, in the order in which the rows are sent.
    """

    peer: int
    rows: Rows
    due: int
    """Round whose buffer or gradient the rows are for; a value equal to the number of rounds means
    the owner's gradient.
    """


class Parcels(NamedTuple):
    """Parcels that a rank sends and receives at the same time."""

    sends: tuple[Parcel, ...] = ()
    receives: tuple[Parcel, ...] = ()


PiecesOf = Callable[[tuple[int, ...]], list[Piece]]
"""Function that returns the pieces of documents that ranks hold, concatenated, without padding."""
GradientSend = tuple[Send, Spans]
"""A send of all places, and the rows whose gradients it passes on, numbered as senders hold them.
"""


class Flow:
    """Routes of all rows of one plan, and of their gradients."""

    def __init__(
        self, geometry: Geometry, pieces_of: PiecesOf, stride: int, reach: Reach, moves: Moves
    ) -> None:
        """Route each row that a query of another place sees; ``moves`` are the operands sent."""
        self.geometry = geometry
        self.num_rows = geometry.local_len * geometry.ulysses_degree
        """Number of rows of each place."""
        self.rounds = len(geometry.rounds)
        self._num_places = geometry.shape.size
        self.in_place = len(geometry.rounds[0].holds) == 1
        """True if a place's first buffer is its own tokens, unchanged."""
        self._line = Line(self._num_places, self.num_rows)
        self._sends = [[self._for_all(send) for send in step.sends] for step in geometry.rounds]
        """Sends of all places, in each round."""

        members = geometry.method.team(np.arange(self._num_places), geometry.shape)
        team_pieces = []
        local_pieces = []
        for place in range(self._num_places):
            team_pieces.append(pieces_of(geometry.ranks_at(members, place)))
            local_pieces.append(pieces_of(geometry.ranks_at((place,), place)))
        reader, owner, first, end = rows_seen(
            as_columns(team_pieces),
            as_columns(local_pieces),
            stride,
            reach if moves == "kv" else reach[::-1],
        )
        self._seen = self._by_round(self._line.spans(reader, owner, first, end))
        """Rows with which each place computes, per round."""
        self._holdings = self._hold()
        """Rows that each place must hold, per round."""
        self._onward, self._home = self._return()

    @kept_in_object
    def held(self, index: int, place: int) -> ByPlace:
        """Return the buffer of a place in a round: local rows, keyed by owner."""
        return self._line.at(place, self._holdings[index])

    def start(self, rank: int) -> Parcels:
        """Return the parcels by which holders gather their rows before the first round."""
        if self.in_place:
            return Parcels()
        place = self.geometry.place(rank)
        buffer = self.held(0, place)

        sends = []
        for holder, rows in self._line.of(place, self._holdings[0]).items():
            sends.append(Parcel(self._rank(holder, rank), rows, 0))

        receives = []
        for owner, rows in indices_by_place(buffer, buffer).items():
            receives.append(Parcel(self._rank(owner, rank), rows, 0))
        return Parcels(tuple(sends), tuple(sorted(receives)))

    def moves(self, rank: int, index: int) -> Parcels:
        """Return the parcels that start to travel at the beginning of round ``index``.

        A rank sends the rows that the receiver will hold. It has all of them, since a place also
        holds the rows of its later sends.
        """
        place = self.geometry.place(rank)
        buffer = self.held(index, place)

        sends = []
        receives = []
        for to, due, source in self._sends[index]:
            target_buffer = self.held(due, to[place])
            if target_buffer:
                rows = _indices(buffer, target_buffer)
                sends.append(Parcel(self._rank(to[place], rank), rows, due))

            next_buffer = self.held(due, place)
            if next_buffer:
                rows = _indices(next_buffer, next_buffer)
                receives.append(Parcel(self._rank(source[place], rank), rows, due))
        return Parcels(tuple(sends), tuple(receives))

    def gradients(self, rank: int, index: int) -> Parcels:
        """Return the gradients that start to travel at the end of round ``index``.

        Gradients for the next holder come first, then those for owners.
        """
        place = self.geometry.place(rank)
        buffer = self.held(index, place)
        sends = []
        receives = []
        for (to, due, source), onward in self._onward[index]:
            sent = self._line.at(place, onward)
            if sent:
                sends.append(Parcel(self._rank(to[place], rank), _indices(buffer, sent), due))

            received = self._line.at(source[place], onward)
            if received:
                rows = _indices(self.held(due, place), received)
                receives.append(Parcel(self._rank(source[place], rank), rows, due))

        home = self._home[index]
        for owner, rows in indices_by_place(buffer, self._line.at(place, home)).items():
            sends.append(Parcel(self._rank(owner, rank), rows, self.rounds))
        for sender, rows in self._line.of(place, home).items():
            receives.append(Parcel(self._rank(sender, rank), rows, self.rounds))
        return Parcels(tuple(sends), tuple(receives))

    def _rank(self, place: int, like: int) -> int:
        """Return the rank at ``place`` that exchanges with rank ``like`` of another place."""
        return self.geometry.ranks_at((place,), place)[like % self.geometry.ulysses_degree]

    def _for_all(self, send: Send) -> Send:
        """Return ``send`` for all places, with the place from which each receives as ``source``.

        ``to`` is a permutation of places, int64 [places], so ``source`` is the inverse permutation.
        """
        to = np.broadcast_to(send.to, self._num_places)
        return Send(to, send.due, np.argsort(to))

    def _by_round(self, visible: Spans) -> list[Spans]:
        """Split the visible rows by the round in which each place needs them for its tiles."""
        all_places = np.arange(self._num_places)
        # Find the round in which a place computes with an owner's rows.
        round_of_pair = np.full(self._num_places**2, self.rounds)
        for index, step in enumerate(self.geometry.rounds):
            if step.gradient is not None:
                for owner in step.holds:
                    round_of_pair[all_places * self._num_places + owner] = index

        # numpy sorts int16 with a radix sort, which is faster.
        rounds = round_of_pair[self._line.pairs(visible)].astype(np.int16)
        order = np.argsort(rounds, kind="stable")
        ends = np.searchsorted(rounds[order], np.arange(self.rounds), "right")
        return [union(visible.where(part)) for part in np.split(order, ends)[:-1]]

    def _hold(self) -> list[Spans]:
        """Return the rows that every place holds in each round, computed backwards.

        A place holds the rows that it computes with, and the rows that the receivers of its sends
        hold. A receiver needs its rows in a later round, so they are already known.
        """
        all_places = np.arange(self._num_places)
        none = np.zeros_like(all_places)
        all_rows = np.full_like(all_places, self.num_rows)
        holdings = [NOWHERE] * self.rounds

        for index in reversed(range(self.rounds)):
            needed = [self._seen[index]]
            for _, due, source in self._sends[index]:
                needed.append(self._line.moved(holdings[due], source))
            if index == 0 and self.in_place:
                needed.append(self._line.spans(all_places, all_places, none, all_rows))
            holdings[index] = union(*needed)

            # A place that sends to itself holds the rows again later, to add the gradients of all
            # rows that it passes on.
            for to, due, _ in self._sends[index]:
                to_self = to == all_places
                if to_self.any():
                    holder = self._line.pairs(holdings[index]) // self._num_places
                    again = holdings[index].where(to_self[holder])
                    holdings[due] = union(holdings[due], again)
        return holdings

    def _return(self) -> tuple[list[list[GradientSend]], list[Spans]]:
        """Return, per round, the gradients for the next holder and the gradients for owners.

        Both are given as rows that the senders hold; some rounds send none to the next holder. A
        gradient is passed on if the next holder stores the row too. That holder adds its own part,
        so one message to the owner replaces two. The owner's own part stays in its buffer.
        """
        onward: list[list[GradientSend]] = [[] for _ in range(self.rounds)]
        home = []
        due_at = [NOWHERE] * self.rounds  # gradients that arrive for each round

        for index, step in enumerate(self.geometry.rounds):
            sums = union(self._seen[index], due_at[index])
            passed_on = NOWHERE
            if step.gradient is not None and step.gradient.due < self.rounds:
                send = self._for_all(step.gradient)
                pairs = self._line.pairs(sums)
                of_others = sums.where(pairs // self._num_places != pairs % self._num_places)
                next_rows = self._line.moved(self._holdings[send.due], send.source)
                passed_on = common(of_others, next_rows)
                onward[index].append((send, passed_on))
                arriving = self._line.moved(passed_on, send.to)
                due_at[send.due] = union(due_at[send.due], arriving)

            home.append(without(sums, passed_on))
        return onward, home


def _indices(buffer: ByPlace, rows: ByPlace) -> Rows:
    """Return the buffer indices of rows, in the order of their owners."""
    return tuple(chain.from_iterable(indices_by_place(buffer, rows).values()))
