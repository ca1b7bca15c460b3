"""Compute on whole matrices of sharded parameters, each on one of the ranks that share them.

Some optimizers need whole matrices, to orthogonalize them, but ranks hold slices: FSDP and
tensor parallelism shard them, data parallelism and hybrid sharding copy them. Here every layout is
the same: a table of the slices of a matrix and the ranks that hold each.

Each matrix gets an owner among the ranks. In a round every owner gathers one matrix, computes, and
sends each rank its slice of the result. A round takes as long as its largest matrix, so the rounds
take the matrices in the order of their sizes, and no other division into rounds is faster:

    round 1   rank 0: matrix 5   rank 1: matrix 2   rank 2: matrix 7
    round 2   rank 0: matrix 1   rank 1: matrix 4   rank 2: matrix 0

So every matrix is computed once in the group. A slice that several ranks hold is sent by one of
them, in turns; an owner sends itself nothing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.data import shard_slices, to_local
from runtime.tensors import Part

BUFFER = 1 << 26
"""Maximum number of elements that a rank sends, or receives, in one collective: 256 MiB in float32.

A round that moves more takes several collectives, each for some rows of every slice.
"""
Read = Callable[[int, slice], Tensor]
"""Function of a matrix's number and rows of this rank's shard that returns these rows."""
Compute = Callable[[int, Tensor], Tensor]
"""Function of a matrix's number and the whole matrix that returns a matrix of the same shape."""
Write = Callable[[int, slice, Tensor], None]
"""Function of a matrix's number, rows of this rank's shard, and these rows of the result."""
Holders = dict[tuple[tuple[int, int], tuple[int, int]], list[int]]
"""Ranks that hold each slice of a matrix, keyed by the bounds of its rows and columns."""


class Piece(NamedTuple):
    """A slice of a matrix that one rank sends to another, or that stays on its rank."""

    matrix: int
    rows: slice
    columns: slice
    source: int
    target: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def cut(self, index: int, count: int) -> "Piece":
        """Return part ``index`` of ``count`` parts of about equal numbers of rows."""
        start = self.rows.start
        length = self.shape[0]
        rows = slice(start + length * index // count, start + length * (index + 1) // count)
        return self._replace(rows=rows)


class Exchange(NamedTuple):
    """This rank's pieces in one direction of a round."""

    local: list[Piece]
    """Pieces that stay on this rank."""
    sent: list[Piece]
    """Pieces for other ranks, ordered by rank."""
    received: list[Piece]
    """Pieces from other ranks, ordered by rank."""
    passes: int
    """Number of collectives, equal on all ranks; 0 if no rank sends anything."""


class Round(NamedTuple):
    """Matrices that are computed at the same time, at most one per owner."""

    matrix: int | None
    """Number of this rank's matrix, if it has one in this round."""
    gather: Exchange
    scatter: Exchange


class WholeMatrices:
    """The plan by which a group's ranks compute on the whole matrices of their parameters.

    Making it needs no communication: each rank derives the slices of all others from the meshes of
    its DTensors. Beside the shards, a rank's memory holds one whole matrix, what the computation
    makes of it, and two buffers of at most ``BUFFER`` elements (or of a row of every slice of the
    round, if that is more).
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Plan the rounds.

        Args:
            parameters: matrices, on all ranks the same ones in the same order; a plain tensor is
                whole on every rank.
            group: ranks that hold the parameters; None is this process alone.
            dtype: dtype of what is sent and computed on.

        Raises:
            ValueError: the group does not hold all of a parameter.
        """
        ranks = [dist.get_rank() if dist.is_initialized() else 0]
        self._rank = 0
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            self._rank = dist.get_rank(group)
        self._group = group
        self._dtype = dtype
        self._device = to_local(parameters[0]).device if parameters else torch.device("cpu")
        self._shapes = [tuple(parameter.shape) for parameter in parameters]

        layouts: dict[Any, tuple[Holders, list[Part]]] = {}
        self._holders: list[Holders] = []
        self._starts: list[int] = []
        """First row of this rank's shard of each matrix."""
        for parameter in parameters:
            key = _layout_key(parameter)
            if key not in layouts:
                layouts[key] = _holders(parameter, ranks)
            holders, parts = layouts[key]
            self._holders.append(holders)
            self._starts.append(parts[self._rank][0].start)

        work = [work_of(shape) for shape in self._shapes]
        self.rounds = [self._round(owners) for owners in balanced_rounds(work, len(ranks))]

    def _round(self, matrix_of: Mapping[int, int]) -> Round:
        """Return the round in which these ranks compute these matrices."""
        gathered: list[Piece] = []
        scattered: list[Piece] = []
        for owner, number in matrix_of.items():
            for turn, (bounds, ranks) in enumerate(self._holders[number].items(), number):
                rows, columns = (slice(*limits) for limits in bounds)
                source = owner if owner in ranks else ranks[turn % len(ranks)]
                gathered.append(Piece(number, rows, columns, source, owner))
                for rank in ranks:
                    scattered.append(Piece(number, rows, columns, owner, rank))
        local_matrix = matrix_of.get(self._rank)
        return Round(local_matrix, self._exchange(gathered), self._exchange(scattered))

    def _exchange(self, pieces: Iterable[Piece]) -> Exchange:
        local = []
        sent = []
        received = []
        traffic = defaultdict[tuple[str, int], int](int)
        for piece in pieces:
            if piece.source == piece.target:
                if piece.source == self._rank:
                    local.append(piece)
                continue
            traffic["from", piece.source] += piece.numel
            traffic["to", piece.target] += piece.numel
            if piece.source == self._rank:
                sent.append(piece)
            elif piece.target == self._rank:
                received.append(piece)
        sent.sort(key=lambda piece: piece.target)
        received.sort(key=lambda piece: piece.source)
        passes = -(-max(traffic.values(), default=0) // BUFFER)
        return Exchange(local, sent, received, passes)

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this rank sends in an ``apply``."""
        elements = 0
        for turn in self.rounds:
            for exchange in (turn.gather, turn.scatter):
                elements += sum(piece.numel for piece in exchange.sent)
        return elements * self._dtype.itemsize

    def apply(self, read: Read, compute: Compute, write: Write) -> None:
        """Compute on every matrix once, and write each rank's slices of the results; collective.

        Args:
            read: returns rows of this rank's shard, of the dtype of the plan.
            compute: called by a matrix's owner; it may not change its argument, and returns the
                same dtype.
            write: called once for each row of each of this rank's shards.
        """
        for turn in self.rounds:
            whole = self._gather(turn, read)
            result: Tensor | None = None
            if turn.matrix is not None and whole is not None:
                result = compute(turn.matrix, whole)
            del whole
            self._scatter(turn.scatter, result, write)
            del result  # before the next matrix is gathered

    def _gather(self, turn: Round, read: Read) -> Tensor | None:
        """Return this rank's whole matrix of a round, if it has one."""

        def take(piece: Piece) -> Tensor:
            return read(piece.matrix, self._shard_rows(piece))

        whole = None
        local = turn.gather.local
        if turn.matrix is not None:
            shape = self._shapes[turn.matrix]
            if [piece.shape for piece in local] == [shape]:
                whole = take(local[0])
            else:
                whole = torch.empty(shape, dtype=self._dtype, device=self._device)
                for piece in local:
                    whole[piece.rows, piece.columns] = take(piece)

        def put(piece: Piece, values: Tensor) -> None:
            assert whole is not None, "only a matrix's owner receives its slices"
            whole[piece.rows, piece.columns] = values

        self._send(turn.gather, take, put)
        return whole

    def _scatter(self, exchange: Exchange, result: Tensor | None, write: Write) -> None:
        """Send the slices of a result to their ranks, and write those for this rank."""

        def take(piece: Piece) -> Tensor:
            assert result is not None, "only a matrix's owner sends its results"
            return result[piece.rows, piece.columns]

        def put(piece: Piece, values: Tensor) -> None:
            write(piece.matrix, self._shard_rows(piece), values)

        for piece in exchange.local:
            put(piece, take(piece))
        self._send(exchange, take, put)

    def _shard_rows(self, piece: Piece) -> slice:
        """Return a piece's rows within this rank's shard."""
        start = self._starts[piece.matrix]
        return slice(piece.rows.start - start, piece.rows.stop - start)

    def _send(
        self,
        exchange: Exchange,
        take: Callable[[Piece], Tensor],
        put: Callable[[Piece, Tensor], None],
    ) -> None:
        """Take the pieces for other ranks, send them, and put those from other ranks."""
        for index in range(exchange.passes):
            sent = [piece.cut(index, exchange.passes) for piece in exchange.sent]
            received = [piece.cut(index, exchange.passes) for piece in exchange.received]
            self._pass(sent, received, take, put)

    def _pass(
        self,
        sent: Sequence[Piece],
        received: Sequence[Piece],
        take: Callable[[Piece], Tensor],
        put: Callable[[Piece, Tensor], None],
    ) -> None:
        """Send pieces in one collective; its buffers are freed before those of the next."""
        size = 1 if self._group is None else self._group.size()
        sent_counts = [0] * size
        received_counts = [0] * size
        for piece in sent:
            sent_counts[piece.target] += piece.numel
        for piece in received:
            received_counts[piece.source] += piece.numel

        outgoing = torch.empty(sum(sent_counts), dtype=self._dtype, device=self._device)
        incoming = outgoing.new_empty(sum(received_counts))
        for piece, chunk in _chunks(sent, outgoing):
            chunk.copy_(take(piece))
        dist.all_to_all_single(incoming, outgoing, received_counts, sent_counts, group=self._group)
        for piece, chunk in _chunks(received, incoming):
            put(piece, chunk)


def _chunks(pieces: Iterable[Piece], buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each piece with its place in a flat buffer."""
    start = 0
    for piece in pieces:
        yield piece, buffer[start : start + piece.numel].view(piece.shape)
        start += piece.numel


def work_of(shape: tuple[int, ...]) -> int:
    """Return a number that grows with the work on a matrix of this shape."""
    rows, columns = shape
    return rows * columns * min(rows, columns)


def balanced_rounds(work: Sequence[float], size: int) -> list[dict[int, int]]:
    """Return the number of the matrix of each rank, keyed by rank, for each round.

    A round takes the ``size`` matrices with the most work that are left; the largest goes to the
    rank with the least work so far.
    """
    largest_first = sorted(range(len(work)), key=lambda number: -work[number])
    loads = [0.0] * size
    rounds = []
    for start in range(0, len(work), size):
        numbers = largest_first[start : start + size]
        ranks = sorted(range(size), key=loads.__getitem__)
        matrix_of = dict(zip(ranks, numbers, strict=False))
        for rank, number in matrix_of.items():
            loads[rank] += work[number]
        rounds.append(matrix_of)
    return rounds


def _layout_key(parameter: Any) -> Any:
    """Return a key that is equal for parameters whose slices are on the same ranks."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape)
    return tuple(parameter.shape), parameter.placements, parameter.device_mesh


def _holders(parameter: Any, ranks: Sequence[int]) -> tuple[Holders, list[Part]]:
    """Return the ranks that hold each slice, and the slices of each rank.

    A DTensor's mesh may have fewer ranks than the group, if further data-parallel copies do not
    show in it (with ``legacy_ddp``); its pattern then repeats over the group.

    Raises:
        ValueError: the mesh is not a part of the group, or slices are missing.
    """
    from torch.distributed.tensor import DTensor

    parts: list[Part] = []
    if isinstance(parameter, DTensor):
        sizes = parameter.device_mesh.shape
        for position in range(math.prod(sizes)):
            parts.append(shard_slices(parameter, _coordinate(position, sizes)))
        mesh_ranks = parameter.device_mesh.mesh.flatten().tolist()
        if not _repeats(mesh_ranks, ranks):
            raise ValueError(
                f"ranks {ranks} shall compute on whole matrices, but ranks {mesh_ranks} share "
                "them; pass the group of all ranks of the pipeline stage"
            )
    else:
        parts.append(tuple(slice(0, length) for length in parameter.shape))
    parts = parts * (len(ranks) // len(parts))

    holders: Holders = {}
    for rank, (rows, columns) in enumerate(parts):
        if rows.stop > rows.start and columns.stop > columns.start:
            bounds = ((rows.start, rows.stop), (columns.start, columns.stop))
            holders.setdefault(bounds, []).append(rank)
    covered = 0
    for rows_of_slice, columns_of_slice in holders:
        covered += (rows_of_slice[1] - rows_of_slice[0]) * (
            columns_of_slice[1] - columns_of_slice[0]
        )
    if covered != parameter.numel():
        raise ValueError(
            f"ranks {ranks} hold {covered} of the {parameter.numel()} elements of a matrix"
        )
    return holders, parts


def _coordinate(position: int, sizes: Sequence[int]) -> list[int]:
    """Return the coordinate of a position in row-major order."""
    coordinate = []
    for size in reversed(sizes):
        position, index = divmod(position, size)
        coordinate.append(index)
    return coordinate[::-1]


def _repeats(block: Sequence[int], ranks: Sequence[int]) -> bool:
    """Return True if ``ranks`` are blocks of equal size, of which ``block`` is one."""
    size = len(block)
    blocks = [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    return len(ranks) % size == 0 and list(block) in blocks
