"""Routes of rows between ranks: only those travel that a query sees at the rank that gets them, or
at one behind it.

A plan's rounds say who holds whose tokens. Here each holder keeps of them what it or a later holder
needs, and the gradients of what it computed go the same way as long as the next holder keeps those
rows too; the others go straight to their owner, which adds what comes in the order of rounds and
senders, whatever arrives first. An owner's own part of the gradient never leaves it.

A *place* is a head group of ranks, as in Geometry. All places are routed at once, on one line of
numbers (``Line``). A rank's rounds are its part of the flow, and the tiles.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from kernels.blocks import Tile
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
    found_in,
    length_of,
    rows_seen,
    union,
    without,
)
from parallel.context.tiles import Piece, append_joined, tiles
from runtime.tensors import kept_in_object


class Parcel(NamedTuple):
    """Rows for, or from, one rank: indices in this rank's buffer, in the order in which they
    travel.
    """

    peer: int
    rows: Rows
    due: int
    """Round whose buffer or gradient they are for; the number of rounds means the owner's gradient.
    """


class Parcels(NamedTuple):
    """Parcels that a rank sends and receives at one time."""

    sends: tuple[Parcel, ...] = ()
    receives: tuple[Parcel, ...] = ()


PiecesOf = Callable[[tuple[int, ...]], list[Piece]]
"""Returns the pieces of documents that ranks hold, joined, without padding."""


class Flow:
    """The routes of all rows of one plan, and of their gradients."""

    def __init__(
        self, geometry: Geometry, pieces_of: PiecesOf, stride: int, reach: Reach, moves: Moves
    ) -> None:
        """Route all rows that a query of another place sees; ``moves`` says what travels."""
        self.geometry, self.local = geometry, geometry.local_len * geometry.ulysses_degree
        self.rounds, self._size = len(geometry.rounds), geometry.shape.size
        self.in_place = len(geometry.rounds[0].holds) == 1
        """True if a place's first buffer is its own tokens as they are."""
        self._line = Line(self._size, self.local)
        self._sends = [[self._from(send) for send in step.sends] for step in geometry.rounds]
        places = range(self._size)
        members = geometry.method.team(np.arange(self._size), geometry.shape)
        teams = as_columns([pieces_of(geometry.ranks_at(members, place)) for place in places])
        own = as_columns([pieces_of(geometry.ranks_at((place,), place)) for place in places])
        seen = rows_seen(teams, own, stride, reach if moves == "kv" else reach[::-1])
        self._seen = self._by_round(self._line.spans(*seen))
        self._holdings = self._hold()
        self._onward, self._home = self._return()

    @kept_in_object
    def held(self, index: int, place: int) -> ByPlace:
        """Return the buffer of a place in a round: rows by owner, in its local indices."""
        return self._line.at(place, self._holdings[index])

    def start(self, rank: int) -> Parcels:
        """Return what travels before the first round: rows of this rank's own to the holders that
        join them.
        """
        if self.in_place:
            return Parcels()
        place = self.geometry.place(rank)
        wanted, held = self._line.of(place, self._holdings[0]), self.held(0, place)
        sends = [Parcel(self._rank(to, rank), rows, 0) for to, rows in wanted.items()]
        receives = [
            Parcel(self._rank(owner, rank), rows, 0) for owner, rows in found_in(held, held).items()
        ]
        return Parcels(tuple(sends), tuple(sorted(receives)))

    def moves(self, rank: int, index: int) -> Parcels:
        """Return what travels as round ``index`` begins."""
        place = self.geometry.place(rank)
        held, sends, receives = self.held(index, place), [], []
        for to, due, source in self._sends[index]:
            target, mine = self.held(due, to[place]), self.held(due, place)
            if target:
                sends.append(Parcel(self._rank(to[place], rank), _all_in(held, target), due))
            if mine:
                receives.append(Parcel(self._rank(source[place], rank), _all_in(mine, mine), due))
        return Parcels(tuple(sends), tuple(receives))

    def gradients(self, rank: int, index: int) -> Parcels:
        """Return which gradients travel as round ``index`` ends: first to the next holder, then to
        owners.
        """
        place = self.geometry.place(rank)
        held, sends, receives = self.held(index, place), [], []
        for (to, due, source), onward in self._onward[index]:
            if sent := self._line.at(place, onward):
                sends.append(Parcel(self._rank(to[place], rank), _all_in(held, sent), due))
            if received := self._line.at(source[place], onward):
                receives.append(
                    Parcel(
                        self._rank(source[place], rank),
                        _all_in(self.held(due, place), received),
                        due,
                    )
                )
        for owner, rows in found_in(held, self._line.at(place, self._home[index])).items():
            sends.append(Parcel(self._rank(owner, rank), rows, self.rounds))
        for sender, rows in self._line.of(place, self._home[index]).items():
            receives.append(Parcel(self._rank(sender, rank), rows, self.rounds))
        return Parcels(tuple(sends), tuple(receives))

    def _rank(self, place: int, like: int) -> int:
        """Return the rank of a place that exchanges with the rank ``like``."""
        return self.geometry.ranks_at((place,), place)[like % self.geometry.ulysses_degree]

    def _from(self, send: Send) -> Send:
        """Return a send of all places, with whom each receives from: int64 ``[places]`` each."""
        to = np.broadcast_to(send.to, self._size)
        return Send(to, send.due, np.argsort(to))

    def _by_round(self, seen: Spans) -> list[Spans]:
        """Return the rows that each place needs for the tiles of each round."""
        places = np.arange(self._size)
        computed = np.full(
            self._size**2, self.rounds
        )  # the round in which a place computes with an owner's rows
        for i, step in enumerate(self.geometry.rounds):
            for of in step.holds if step.gradient is not None else ():
                computed[places * self._size + of] = i
        rounds = computed[self._line.pairs(seen)].astype(np.int16)  # which numpy sorts by radix
        order = np.argsort(rounds, kind="stable")
        ends = np.searchsorted(rounds[order], np.arange(self.rounds), "right")
        return [union(seen.where(part)) for part in np.split(order, ends)[:-1]]

    def _hold(self) -> list[Spans]:
        """Return what every place holds in every round, from the last round to the first."""
        places, held = np.arange(self._size), [NOWHERE] * self.rounds
        own = self._line.spans(
            places, places, np.zeros_like(places), np.full_like(places, self.local)
        )
        for i in reversed(range(self.rounds)):
            later = (self._line.moved(held[due], source) for _, due, source in self._sends[i])
            held[i] = union(self._seen[i], *later, own if i == 0 and self.in_place else NOWHERE)
            for to, due, _ in self._sends[i]:
                again = (
                    to == places
                )  # they hold them again, to add the gradients of all that they hand on
                if again.any():
                    held[due] = union(
                        held[due], held[i].where(again[self._line.pairs(held[i]) // self._size])
                    )
        return held

    def _return(self) -> tuple[list[list[tuple[Send, Spans]]], list[Spans]]:
        """Return per round what goes to the next holder, if any does, and what goes home; both as
        held by senders.
        """
        onward: list[list[tuple[Send, Spans]]] = [[] for _ in range(self.rounds)]
        home, due_at = [], [NOWHERE] * self.rounds
        for i, step in enumerate(self.geometry.rounds):
            sums, on = union(self._seen[i], due_at[i]), NOWHERE
            if step.gradient is not None and step.gradient.due < self.rounds:
                next_holder = self._from(step.gradient)
                pairs = self._line.pairs(sums)
                others = sums.where(pairs // self._size != pairs % self._size)
                on = common(
                    others, self._line.moved(self._holdings[next_holder.due], next_holder.source)
                )
                onward[i].append((next_holder, on))
                due_at[next_holder.due] = union(
                    due_at[next_holder.due], self._line.moved(on, next_holder.to)
                )
            home.append(without(sums, on))
        return onward, home


def _all_in(buffer: ByPlace, wanted: ByPlace) -> Rows:
    """Return where rows lie in a buffer, in the order of their owners."""
    return tuple(chain.from_iterable(found_in(buffer, wanted).values()))


class RankRound(NamedTuple):
    """One round of one rank: what its buffer holds, what travels, and the tiles to compute."""

    length: int
    """Rows of the buffer; ``in_place``: they are the rank's own tensors as they are."""
    in_place: bool
    joined: Parcels
    """Rows that holders join before the first round; none in others."""
    moves: Parcels
    gradients: Parcels
    tiles: tuple[Tile, ...]


def rank_schedule(
    flow: Flow, rank: int, pieces_of: PiecesOf, stride: int, reach: Reach, moves: Moves
) -> tuple[RankRound, ...]:
    """Return what ``rank`` sends, receives and computes in each round."""
    geometry = flow.geometry
    team, place, rounds = pieces_of(geometry.team(rank)), geometry.place(rank), []
    owners = {owner for i in range(flow.rounds) for owner in flow.held(i, place)}
    pieces = {owner: pieces_of(geometry.ranks_at((owner,), owner)) for owner in owners}
    for i, step in enumerate(geometry.rounds):
        held, computed = flow.held(i, place), tuple[Tile, ...]()
        if held and step.gradient is not None:
            there = clipped(held, pieces, stride)
            computed = tiles(*((team, there) if moves == "kv" else (there, team)), stride, reach)
        parcels = (
            flow.start(rank) if i == 0 else Parcels(),
            flow.moves(rank, i),
            flow.gradients(rank, i),
        )
        rounds.append(RankRound(length_of(held), i == 0 and flow.in_place, *parcels, computed))
    return tuple(rounds)


def clipped(held: ByPlace, pieces: Mapping[int, list[Piece]], stride: int) -> list[Piece]:
    """Return the pieces of a buffer: those of its owners, cut to the rows held; adjoining ones are
    one.
    """
    found: list[Piece] = []
    offset = 0
    for owner, rows in held.items():
        own, j = pieces[owner], 0
        for first, end in rows:
            while j < len(own) and own[j].offset < end:
                piece, last = own[j], own[j].offset + own[j].length
                low, high = max(first, piece.offset), min(end, last)
                if low < high:
                    start = piece.start + (low - piece.offset) * stride
                    append_joined(
                        found,
                        Piece(start, offset + low - first, high - low, piece.document),
                        stride,
                    )
                if last > end:
                    break  # the next rows may have more of it
                j += 1
            offset += end - first
    return found
