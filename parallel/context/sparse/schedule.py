"""Rounds of one rank when only the rows that a query sees travel: parcels and tiles.

A rank's buffer of a round is only part of its owners' tokens. Its pieces are cut accordingly, and
then the same ``tiles`` serves it as any other set of positions.
"""

from collections.abc import Mapping
from typing import NamedTuple

from kernels.blocks import Tile
from parallel.context.geometry import Moves
from parallel.context.layout import Reach
from parallel.context.sparse.flow import Flow, Parcels, PiecesOf
from parallel.context.sparse.rows import ByPlace, length_of
from parallel.context.tiles import Piece, append_joined, tiles


class RankRound(NamedTuple):
    """One round of one rank: its buffer, the parcels that travel, and the tiles to compute."""

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
    """Return the rounds of ``rank``."""
    geometry = flow.geometry
    team = pieces_of(geometry.team(rank))
    place = geometry.place(rank)
    owners = {owner for index in range(flow.rounds) for owner in flow.held(index, place)}
    pieces = {owner: pieces_of(geometry.ranks_at((owner,), owner)) for owner in owners}

    rounds = []
    for index, step in enumerate(geometry.rounds):
        buffer = flow.held(index, place)
        computed: tuple[Tile, ...] = ()
        if buffer and step.gradient is not None:
            visitors = clipped(buffer, pieces, stride)
            if moves == "kv":
                computed = tiles(team, visitors, stride, reach)
            else:
                computed = tiles(visitors, team, stride, reach)
        rounds.append(
            RankRound(
                length=length_of(buffer),
                in_place=index == 0 and flow.in_place,
                joined=flow.start(rank) if index == 0 else Parcels(),
                moves=flow.moves(rank, index),
                gradients=flow.gradients(rank, index),
                tiles=computed,
            )
        )
    return tuple(rounds)


def clipped(buffer: ByPlace, pieces: Mapping[int, list[Piece]], stride: int) -> list[Piece]:
    """Return the pieces of a buffer: those of its owners, cut to the rows that it holds.

    Adjoining pieces are joined.
    """
    joined: list[Piece] = []
    offset = 0  # of the current rows in the buffer

    for owner, rows in buffer.items():
        owner_pieces = pieces[owner]
        index = 0
        for first, end in rows:
            while index < len(owner_pieces) and owner_pieces[index].offset < end:
                piece = owner_pieces[index]
                piece_end = piece.offset + piece.length
                low = max(first, piece.offset)
                high = min(end, piece_end)
                if low < high:
                    start = piece.start + (low - piece.offset) * stride
                    part = Piece(start, offset + low - first, high - low, piece.document)
                    append_joined(joined, part, stride)

                if piece_end > end:
                    break  # the next rows may have more of it
                index += 1

            offset += end - first
    return joined
