"""The rounds of one rank if only the rows that a query sees travel: parcels and tiles.

In a round, a rank's buffer has only some of the tokens of their owners. The owners' pieces are cut
to these tokens, and then ``tiles`` handles them like any other set of positions.
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
    """Number of rows in the buffer."""
    in_place: bool  # True if the buffer is the rank's own tensors, unchanged
    joined: Parcels
    """Rows that holders gather before the first round; empty in other rounds."""
    moves: Parcels
    gradients: Parcels
    tiles: tuple[Tile, ...]


def rank_schedule(
    flow: Flow, rank: int, pieces_of: PiecesOf, stride: int, reach: Reach, moves: Moves
) -> tuple[RankRound, ...]:
    """Return the rounds of ``rank``, in order."""
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
    """Return the pieces of a buffer: its owners' pieces, cut to the rows that it holds.

    Adjoining pieces are joined.
    """
    joined: list[Piece] = []
    offset = 0  # index of the current rows in the buffer

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
                    break  # the next rows may contain more of this piece
                index += 1

            offset += end - first
    return joined
