"""Schedule of each rank where only the rows that a query sees travel: its part of a plan's flow, and the tiles."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kernels.blocks import Tile
from parallel.context.geometry import Geometry
from parallel.context.mask import Reach
from parallel.context.sparse.flow import Flow, Parcels
from parallel.context.sparse.rows import ByPlace, length_of
from parallel.context.sparse.visible import as_columns, rows_seen
from parallel.context.tiles import Piece, tiles
from parallel.context.traffic import Moves

PiecesOf = Callable[[tuple[int, ...]], list[Piece]]
"""Returns the pieces of documents that ranks hold, joined, without padding."""


class RankRound(NamedTuple):
    """One round of one rank: what its buffer holds, what travels, and the tiles to compute."""

    length: int
    """Rows of the buffer; ``in_place``: they are the rank's own tensors as they are."""
    in_place: bool
    moves: Parcels
    gradients: Parcels
    tiles: tuple[Tile, ...]


class RankSchedule(NamedTuple):
    """All that one rank does in a forward or a backward."""

    start: Parcels
    rounds: tuple[RankRound, ...]


def flow_of(geometry: Geometry, pieces_of: PiecesOf, stride: int, reach: Reach, moves: Moves) -> Flow:
    """Return the routes of all rows that a query of another place sees; ``moves`` says what travels."""
    places = range(geometry.shape.size)
    own = [pieces_of(geometry.ranks_at((place,), place)) for place in places]
    members = geometry.method.team(np.arange(len(places)), geometry.shape)
    teams = [pieces_of(geometry.ranks_at(members, place)) for place in places]
    seen = rows_seen(as_columns(teams), as_columns(own), stride, reach if moves == "kv" else reach[::-1])
    return Flow(geometry, seen)


def rank_schedule(flow: Flow, rank: int, pieces_of: PiecesOf, stride: int, reach: Reach, moves: Moves) -> RankSchedule:
    """Return what ``rank`` sends, receives and computes."""
    geometry = flow.geometry
    team, place, rounds = pieces_of(geometry.team(rank)), geometry.place(rank), []
    owners = {owner for i in range(flow.rounds) for owner in flow.held(i, place)}
    pieces = {owner: pieces_of(geometry.ranks_at((owner,), owner)) for owner in owners}
    for i, step in enumerate(geometry.rounds):
        held, computed = flow.held(i, place), tuple[Tile, ...]()
        if held and step.gradient is not None:
            there = clipped(held, pieces, stride)
            computed = tiles(*((team, there) if moves == "kv" else (there, team)), stride, reach)
        parcels = flow.moves(rank, i), flow.gradients(rank, i)
        rounds.append(RankRound(length_of(held), i == 0 and flow.in_place, *parcels, computed))
    return RankSchedule(flow.start(rank), tuple(rounds))


def clipped(held: ByPlace, pieces: Mapping[int, list[Piece]], stride: int) -> list[Piece]:
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


def _cut(held: ByPlace, pieces: Mapping[int, list[Piece]], stride: int) -> Iterator[Piece]:
    offset = 0
    for owner, rows in held.items():
        own, j = pieces[owner], 0
        for first, end in rows:
            while j < len(own) and own[j].offset < end:
                piece, last = own[j], own[j].offset + own[j].length
                low, high = max(first, piece.offset), min(end, last)
                if low < high:
                    start = piece.start + (low - piece.offset) * stride
                    yield Piece(start, offset + low - first, high - low, piece.document)
                if last > end:
                    break  # the next rows may have more of it
                j += 1
            offset += end - first
