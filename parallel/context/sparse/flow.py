"""Which rows travel where: only those that a query sees at the rank that gets them, or at one that gets them from it.

A plan's hops say who holds whose tokens in each round. Here each holder keeps of them what it or a later holder needs,
and the gradients of what it computed go the same way as long as the next holder keeps those rows too; the others go
straight to their owner, which adds what comes in the order of rounds and senders, whatever arrives first. An owner's
own part of the gradient never leaves it.

A *place* is a head group of ranks, as in Geometry. All places are routed at once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kernels.tiles import Tile
from parallel.context.geometry import Geometry
from parallel.context.methods.base import Ranks
from parallel.context.sparse.rows import NONE, Rows, common, count, places_in, union, without
from parallel.context.sparse.visible import Table
from parallel.context.tiles import Piece

ByOwner = Mapping[int, Rows]
"""Rows of several places, each set in its owner's local indices."""
NOTHING: ByOwner = {}


class Parcel(NamedTuple):
    """Rows for, or from, one rank: indices in this rank's buffer, in the order in which they travel."""

    peer: int
    rows: Rows
    due: int
    """Round whose buffer or gradient they are for; the number of rounds means the owner's gradient."""


class Parcels(NamedTuple):
    """What a rank sends and receives at one time."""

    sends: tuple[Parcel, ...] = ()
    receives: tuple[Parcel, ...] = ()


@dataclass(frozen=True)
class Held:
    """What a place holds in one round, in the order of its buffer."""

    rows: ByOwner = field(default_factory=dict)

    @cached_property
    def length(self) -> int:
        """Count the rows of the buffer."""
        return sum(map(count, self.rows.values()))

    def find(self, wanted: ByOwner) -> Rows:
        """Return where rows lie in the buffer, in the order of their owners."""
        found: list[tuple[int, int]] = []
        for owner in sorted(wanted):
            found += places_in(wanted[owner], self.rows[owner], self._offsets[owner])
        return tuple(found)

    @cached_property
    def _offsets(self) -> dict[int, int]:
        sizes = [count(rows) for rows in self.rows.values()]
        return dict(zip(self.rows, np.cumsum([0, *sizes]).tolist(), strict=False))


class Flow:
    """The routes of all rows of one plan, and of their gradients."""

    def __init__(self, geometry: Geometry, seen: Table) -> None:
        """Route the rows; ``seen`` has those of each place (second) that some token of another (first) needs."""
        self.geometry, self.local = geometry, geometry.local_len * geometry.ulysses_degree
        self._hops, self._size = geometry.hops, geometry.shape.size
        self._holds = [[self._listed(of) for of in hop.holds] for hop in self._hops]
        self._sends = [[(self._listed(send.to), send.due) for send in hop.sends] for hop in self._hops]
        self._seen = [[self._used(i, place, seen) for place in range(self._size)] for i in range(len(self._hops))]
        self.held = self._route()
        self._onward, self._home = self._return()

    def start(self, rank: int) -> Parcels:
        """Return what travels before the first round: rows of this rank's own to the holders that join them."""
        place = self.geometry.place(rank)
        sends = [
            Parcel(self._rank(to, rank), rows, 0)
            for to in range(self._size)
            if not self.in_place(to) and (rows := self.held[0][to].rows.get(place, NONE))
        ]
        held = self.held[0][place]
        receives = [
            Parcel(self._rank(owner, rank), held.find({owner: rows}), 0)
            for owner, rows in held.rows.items()
            if rows and not self.in_place(place)
        ]
        return Parcels(tuple(sends), tuple(sorted(receives)))

    def moves(self, rank: int, index: int) -> Parcels:
        """Return what travels as round ``index`` begins."""
        place, held = self.geometry.place(rank), self.held[index]
        sends, receives = [], []
        for targets, due in self._sends[index]:
            target = self.held[due][targets[place]]
            if target.length:
                sends.append(Parcel(self._rank(targets[place], rank), held[place].find(target.rows), due))
            source, mine = targets.index(place), self.held[due][place]
            if mine.length:
                receives.append(Parcel(self._rank(source, rank), mine.find(mine.rows), due))
        return Parcels(tuple(sends), tuple(receives))

    def gradients(self, rank: int, index: int) -> Parcels:
        """Return which gradients travel as round ``index`` ends: first to the next holder, then to owners."""
        place, end = self.geometry.place(rank), len(self._hops)
        held = self.held[index]
        sends, receives = [], []
        for sender, (to, due, rows) in self._onward[index].items():
            if sender == place:
                sends.append(Parcel(self._rank(to, rank), held[place].find(rows), due))
            if to == place:
                receives.append(Parcel(self._rank(sender, rank), self.held[due][place].find(rows), due))
        for sender, by_owner in self._home[index].items():
            if sender == place:
                for owner in sorted(by_owner):
                    sends.append(Parcel(self._rank(owner, rank), held[place].find({owner: by_owner[owner]}), end))
            if place in by_owner:
                receives.append(Parcel(self._rank(sender, rank), by_owner[place], end))
        return Parcels(tuple(sends), tuple(receives))

    def _rank(self, place: int, like: int) -> int:
        """Return the rank of a place that exchanges with the rank ``like``."""
        return self.geometry.ranks_at((place,), place)[like % self.geometry.ulysses_degree]

    def _listed(self, of: Ranks) -> list[int]:
        return np.broadcast_to(of, self._size).tolist()

    def in_place(self, place: int) -> bool:
        """Return whether a place's first buffer is its own tokens as they are."""
        return [of[place] for of in self._holds[0]] == [place]

    def _used(self, index: int, place: int, seen: Table) -> ByOwner:
        """Return the rows that a place needs for the tiles of a round."""
        if self._hops[index].gradient is None:
            return NOTHING
        owners = (of[place] for of in self._holds[index])
        return {owner: rows for owner in owners if (rows := seen.get((place, owner), NONE))}

    def _route(self) -> list[list[Held]]:
        """Return what every place holds in every round, from the last round to the first."""
        held: list[list[Held]] = [[] for _ in self._hops]
        for i in reversed(range(len(self._hops))):
            for place in range(self._size):
                later = (held[due][to[place]].rows for to, due in self._sends[i])
                rows = _joined(self._seen[i][place], *later)
                if i == 0 and self.in_place(place):
                    rows = {place: ((0, self.local),)}
                held[i].append(Held(rows))
                for to, due in self._sends[i]:
                    if to[place] == place:  # it holds them again, to add the gradients of all that it hands on
                        held[due][place] = held[i][place]
        return held

    def _return(self) -> tuple[list[dict[int, tuple[int, int, ByOwner]]], list[dict[int, ByOwner]]]:
        """Return per round and sender what goes to the next holder, (place, round, rows), and what goes home."""
        due_at: list[dict[int, ByOwner]] = [{} for _ in self._hops]
        onward: list[dict[int, tuple[int, int, ByOwner]]] = [{} for _ in self._hops]
        home: list[dict[int, ByOwner]] = [{} for _ in self._hops]
        for i, hop in enumerate(self._hops):
            if hop.gradient is None:
                continue
            targets, due = self._listed(hop.gradient.to), hop.gradient.due
            for place in range(self._size):
                sums = _joined(self._seen[i][place], due_at[i].pop(place, NOTHING))
                if not sums:
                    continue
                if due < len(self._hops) and not (i == 0 and self.in_place(place)):
                    kept = self.held[due][targets[place]].rows
                    on = {owner: rows for owner in sums if (rows := common(sums[owner], kept.get(owner, NONE)))}
                    if on:
                        onward[i][place] = targets[place], due, on
                        due_at[due][targets[place]] = _joined(due_at[due].get(targets[place], NOTHING), on)
                        sums = {o: rest for o in sums if (rest := without(sums[o], on.get(o, NONE)))}
                if sums:
                    home[i][place] = sums
        return onward, home


def _joined(*several: ByOwner) -> ByOwner:
    """Return the union of the rows of each owner, in ascending order of owners."""
    present = [rows for rows in several if rows]
    if len(present) <= 1:
        return present[0] if present else NOTHING
    owners = sorted({owner for rows in present for owner in rows})
    return {owner: union(*(rows.get(owner, NONE) for rows in present)) for owner in owners}


def clipped(held: Held, pieces: Mapping[int, list[Piece]], stride: int) -> list[Piece]:
    """Return the pieces of a buffer: those of its owners, cut to the rows held; adjoining ones are one."""
    found: list[Piece] = []
    for piece in _cut(held, pieces, stride):
        last = found[-1] if found else None
        if (
            last
            and (last.document, last.offset + last.length) == (piece.document, piece.offset)
            and (last.start + last.length * stride == piece.start)
        ):
            found[-1] = last._replace(length=last.length + piece.length)
        else:
            found.append(piece)
    return found


def _cut(held: Held, pieces: Mapping[int, list[Piece]], stride: int) -> Iterator[Piece]:
    offset = 0
    for owner, rows in held.rows.items():
        for first, end in rows:
            for piece in pieces[owner]:
                low, high = max(first, piece.offset), min(end, piece.offset + piece.length)
                if low < high:
                    start = piece.start + (low - piece.offset) * stride
                    yield Piece(start, offset + low - first, high - low, piece.document)
            offset += end - first


class Stop(NamedTuple):
    """One round of one rank: what its buffer holds, what travels, and the tiles to compute."""

    length: int
    """Rows of the buffer; ``in_place``: they are the rank's own tensors as they are."""
    in_place: bool
    moves: Parcels
    gradients: Parcels
    tiles: tuple[Tile, ...]


class Course(NamedTuple):
    """All that one rank does in a forward or a backward."""

    start: Parcels
    stops: tuple[Stop, ...]


def course(flow: Flow, rank: int, tiles_of: Callable[[int, Held], tuple[Tile, ...]]) -> Course:
    """Return the course of ``rank``; ``tiles_of`` returns the tiles of a round, given what is held in it."""
    place, stops = flow.geometry.place(rank), []
    for i, held in enumerate(flow.held):
        mine = held[place]
        computed = tiles_of(i, mine) if mine.length else ()
        parcels = flow.moves(rank, i), flow.gradients(rank, i)
        stops.append(Stop(mine.length, i == 0 and flow.in_place(place), *parcels, computed))
    return Course(flow.start(rank), tuple(stops))
