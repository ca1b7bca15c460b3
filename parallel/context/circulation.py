"""Circulate KV or queries among ranks, round by round, and return their gradients: whole tensors,
or the rows needed.

Every transfer is posted before the compute that hides it. What is added, is added in a fixed order,
so that results do not depend on what arrives first.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.blocks import Tile
from parallel.context.methods.base import Round
from parallel.context.sparse.flow import Parcels, RankRound
from parallel.context.sparse.rows import Rows, count
from parallel.context.transport import Arrival, Tensors, Transport

Visit = tuple[int, tuple[Tile, ...], Tensors]
"""A round's index, its tiles, and the tensors that this rank holds in it."""


class Whole:
    """Whole tensors circulate, as the method's paper says; a gradient follows one round behind."""

    def __init__(
        self,
        transport: Transport,
        rounds: tuple[Round, ...],
        holders: tuple[int, ...],
        arrival: Arrival,
    ) -> None:
        """``arrival`` brings what the first round holds: the tensors of ``holders``, joined."""
        self._transport, self._rounds, self._holders = transport, rounds, holders
        self._due: dict[int, Arrival] = {0: arrival}
        self._gradients: dict[int, list[Arrival]] = {}

    def visits(self) -> Iterator[Visit]:
        """Yield every round with something to do, while what later ones hold is in transit."""
        for i, step in enumerate(self._rounds):
            held = self._due.pop(i)()
            for send in step.sends:
                self._due[send.due] = self._transport.send_recv(held, send, send.due > i + 1)
            if step.gradient is not None:
                yield i, step.tiles, held

    def send_gradient(self, index: int, moved: Tensors) -> None:
        """Take this rank's gradient of what round ``index`` held; it may be changed."""
        coming = self._gradients.pop(index, [])
        while coming:
            torch._foreach_add_(moved, coming.pop(0)())  # nothing names what came, or what was sent
        send = self._rounds[index].gradient
        assert send is not None
        sent = self._transport.send_recv(moved, send, send.due > index + 1)
        self._gradients.setdefault(send.due, []).append(sent)

    def own_gradient(self) -> Tensors:
        """Return the whole gradient of this rank's own rows; () if it had no part in any."""
        (arrival,) = self._gradients.pop(len(self._rounds))
        return tuple(self._transport.reduced(x, self._holders) for x in arrival())


class Needed:
    """Only rows that a query sees travel (parallel/context/sparse/flow.py); methods as in
    ``Whole``.
    """

    def __init__(self, transport: Transport, rounds: tuple[RankRound, ...], own: Tensors) -> None:
        self._transport, self._rounds, self._own = transport, rounds, own
        self._arriving: dict[int, list[tuple[Rows, Arrival]]] = {}
        self._returning: dict[int, list[tuple[Rows, Arrival]]] = {}
        self._sent: list[tuple[int, Callable[[], object]]] = []
        self._sums: Tensors = ()

    def visits(self) -> Iterator[Visit]:
        self._transport.connect_all(self._own[0].device)
        self._post(self._rounds[0].joined, self._own, 0, self._arriving)
        for i, step in enumerate(self._rounds):
            held = (
                self._own if step.in_place else self._filled(step.length, self._arriving.pop(i, []))
            )
            self._finish(i)
            self._post(step.moves, held, i + 1, self._arriving)
            if (
                step.tiles
                or step.gradients.sends
                or step.gradients.receives
                or i in self._returning
            ):
                yield i, step.tiles, held
        self._finish(len(self._rounds))

    def send_gradient(self, index: int, moved: Tensors) -> None:
        for rows, arrival in self._returning.pop(index, []):
            _add(moved, rows, arrival())
        self._post(self._rounds[index].gradients, moved, index + 1, self._returning)

    def own_gradient(self) -> Tensors:
        for rows, arrival in self._returning.pop(len(self._rounds), []):
            parts, tokens = arrival(), self._own[0].shape[1]
            if self._sums:
                _add(self._sums, rows, parts)
            elif self._rounds[0].in_place and parts[0].shape[1] == tokens:
                self._sums = parts  # of this rank's own buffer, which nothing else uses now
            else:
                self._sums = tuple(x.new_zeros(x.shape[0], tokens, *x.shape[2:]) for x in parts)
                _add(self._sums, rows, parts)
        self._finish(len(self._rounds))
        return self._sums

    def _post(
        self,
        parcels: Parcels,
        tensors: Tensors,
        following: int,
        waiting: dict[int, list[tuple[Rows, Arrival]]],
    ) -> None:
        """Start sends of ``tensors`` and receives like them; ``following`` is the next round."""
        for due in sorted({parcel.due for side in parcels for parcel in side}):
            sends = [
                (parcel.peer, _taken(tensors, parcel.rows))
                for parcel in parcels.sends
                if parcel.due == due
            ]
            receives = [parcel for parcel in parcels.receives if parcel.due == due]
            wanted = [(parcel.peer, _empty(tensors, count(parcel.rows))) for parcel in receives]
            arrivals, sent = self._transport.isend_irecv(sends, wanted, due > following)
            waiting.setdefault(due, []).extend(
                (parcel.rows, arrival) for parcel, arrival in zip(receives, arrivals, strict=True)
            )
            self._sent.append((due if waiting is self._arriving else min(due, following + 1), sent))

    def _filled(self, length: int, arriving: list[tuple[Rows, Arrival]]) -> Tensors:
        """Return a buffer of ``length`` rows, filled by what arrives."""
        if len(arriving) == 1:
            return arriving[0][1]()  # all of it
        buffer = _empty(self._own, length)
        for rows, arrival in arriving:
            for mine, theirs in zip(buffer, arrival(), strict=True):
                for (first, end), part in _parts(rows, theirs):
                    mine[:, first:end] = part
        return buffer

    def _finish(self, index: int) -> None:
        """Let go of what is sent: keys that were due by round ``index``, gradients of two rounds
        before it.

        The rank that is in the earliest round waits for nothing that is not posted, so ranks cannot
        wait in a circle.
        """
        for until, sent in self._sent:
            if until <= index:
                sent()
        self._sent = [(until, sent) for until, sent in self._sent if until > index]


def _taken(tensors: Tensors, rows: Rows) -> Tensors:
    """Return these rows, in this order."""
    if len(rows) == 1:
        return tuple(x[:, rows[0][0] : rows[0][1]] for x in tensors)
    return tuple(torch.cat([x[:, first:end] for first, end in rows], 1) for x in tensors)


def _empty(like: Tensors, length: int) -> Tensors:
    return tuple(x.new_empty(x.shape[0], length, *x.shape[2:]) for x in like)


def _add(sums: Tensors, rows: Rows, parts: Tensors) -> None:
    for mine, theirs in zip(sums, parts, strict=True):
        for (first, end), part in _parts(rows, theirs):
            mine[:, first:end] += part


def _parts(rows: Rows, x: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield the intervals of ``rows`` with their part of x, which holds them one after another."""
    return zip(rows, x.split([end - first for first, end in rows], 1), strict=True)
