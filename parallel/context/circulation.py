"""Circulate KV or queries among ranks, round by round, and return their gradients.

Either whole tensors circulate, or only the rows that some query sees. Every transfer is posted
before the compute that hides it. Gradients are added in a fixed order, so that results do not
depend on which message arrives first.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.blocks import Tile
from parallel.context.methods.base import Round
from parallel.context.sparse.flow import Parcels
from parallel.context.sparse.rows import Rows, count
from parallel.context.sparse.schedule import RankRound
from parallel.context.transport import Arrival, Tensors, Transport

Visit = tuple[int, tuple[Tile, ...], Tensors]
"""A round's index, its tiles, and the tensors that this rank holds in it."""
RowArrival = tuple[Rows, Arrival]
"""Indices of buffer rows, and the pending transfer that fills them."""


class WholeTensors:
    """Circulates whole tensors, as the method's paper does; a gradient follows one round behind."""

    def __init__(
        self,
        transport: Transport,
        rounds: tuple[Round, ...],
        holders: tuple[int, ...],
        arrival: Arrival,
    ) -> None:
        """Start with the tensors of the first round, which ``arrival`` gathers from ``holders``."""
        self._transport = transport
        self._rounds = rounds
        self._holders = holders
        self._due: dict[int, Arrival] = {0: arrival}
        self._gradients: dict[int, list[Arrival]] = {}

    def visits(self) -> Iterator[Visit]:
        """Yield each round that computes tiles, while the next round's tensors are in transit."""
        for index, step in enumerate(self._rounds):
            visiting = self._due.pop(index)()

            for send in step.sends:
                is_far = send.due > index + 1
                self._due[send.due] = self._transport.send_recv(visiting, send, is_far)

            if step.gradient is not None:
                yield index, step.tiles, visiting

    def send_gradient(self, index: int, gradient: Tensors) -> None:
        """Add the gradients that arrive for round ``index``, and send the sum on.

        ``gradient`` may be overwritten.
        """
        arrivals = self._gradients.pop(index, [])
        while arrivals:
            # No variable holds the arrived tensors, so their memory is free before the next
            # transfer.
            torch._foreach_add_(gradient, arrivals.pop(0)())

        send = self._rounds[index].gradient
        assert send is not None
        arrival = self._transport.send_recv(gradient, send, send.due > index + 1)
        self._gradients.setdefault(send.due, []).append(arrival)

    def own_gradient(self) -> Tensors:
        """Return the full gradient of this rank's own rows."""
        (arrival,) = self._gradients.pop(len(self._rounds))
        return tuple(self._transport.reduced(x, self._holders) for x in arrival())


class NeededRows:
    """Circulates only the rows that some query sees (parallel/context/sparse/flow.py).

    The class has the same methods as ``WholeTensors``.

    Gradients of several ranks arrive for the same rows, in any order. Floating-point addition is
    not associative, so adding them as they arrive would make two runs differ. Instead they are
    awaited and added in the order of the plan; a test delays ranks at random to check this.
    """

    def __init__(self, transport: Transport, rounds: tuple[RankRound, ...], local: Tensors) -> None:
        self._transport = transport
        self._rounds = rounds
        self._local = local
        self._arriving: dict[int, list[RowArrival]] = {}
        """Rows in transit, keyed by the round whose buffer receives them."""
        self._returning: dict[int, list[RowArrival]] = {}
        """Gradients in transit, keyed by the round to whose gradient they are added."""
        self._sent: list[tuple[int, Callable[[], object]]] = []
        """Pending sends: the round in which to wait for each and free its buffers, and the function
        that waits."""
        self._sums: Tensors = ()
        """Gradient of this rank's own rows, summed so far."""

    def visits(self) -> Iterator[Visit]:
        """Yield each round that computes tiles, or adds or forwards gradients."""
        self._transport.connect_all(self._local[0].device)
        self._post(self._rounds[0].joined, self._local, 0, self._arriving)
        for index, step in enumerate(self._rounds):
            if step.in_place:
                visiting = self._local
            else:
                visiting = self._filled(step.length, self._arriving.pop(index, []))

            self._finish(index)
            self._post(step.moves, visiting, index + 1, self._arriving)

            gradients = step.gradients
            if step.tiles or gradients.sends or gradients.receives or index in self._returning:
                yield index, step.tiles, visiting

        self._finish(len(self._rounds))

    def send_gradient(self, index: int, gradient: Tensors) -> None:
        """Add the gradients that arrive for round ``index``; send the sums on, or to owners."""
        for rows, arrival in self._returning.pop(index, []):
            _add(gradient, rows, arrival())
        self._post(self._rounds[index].gradients, gradient, index + 1, self._returning)

    def own_gradient(self) -> Tensors:
        """Return the full gradient of this rank's own rows; () if no query saw them."""
        tokens = self._local[0].shape[1]
        for rows, arrival in self._returning.pop(len(self._rounds), []):
            parts = arrival()
            if self._sums:
                _add(self._sums, rows, parts)
            elif self._rounds[0].in_place and parts[0].shape[1] == tokens:
                self._sums = parts  # this rank's own buffer, which nothing else uses now
            else:
                self._sums = tuple(x.new_zeros(x.shape[0], tokens, *x.shape[2:]) for x in parts)
                _add(self._sums, rows, parts)
        self._finish(len(self._rounds))
        return self._sums

    def _post(
        self,
        parcels: Parcels,
        tensors: Tensors,
        next_round: int,
        waiting: dict[int, list[RowArrival]],
    ) -> None:
        """Start sending rows of ``tensors``, and receiving rows into new buffers of its dtypes.

        Args:
            parcels: rows to send and receive.
            tensors: this rank's buffer of the current round.
            next_round: the round after the current one; transfers that are due later use the
                ``far`` group.
            waiting: the table that the receives are added to.
        """
        all_parcels = parcels.sends + parcels.receives
        for due in sorted({parcel.due for parcel in all_parcels}):
            sends = []
            for parcel in parcels.sends:
                if parcel.due == due:
                    sends.append((parcel.peer, _rows_of(tensors, parcel.rows)))
            receives = [parcel for parcel in parcels.receives if parcel.due == due]
            buffers = [(parcel.peer, _empty(tensors, count(parcel.rows))) for parcel in receives]
            arrivals, sent = self._transport.isend_irecv(sends, buffers, due > next_round)

            pending = waiting.setdefault(due, [])
            for parcel, arrival in zip(receives, arrivals, strict=True):
                pending.append((parcel.rows, arrival))
            is_gradient = waiting is not self._arriving
            until = min(due, next_round + 1) if is_gradient else due
            self._sent.append((until, sent))

    def _filled(self, length: int, arriving: list[RowArrival]) -> Tensors:
        """Return a buffer of ``length`` rows, filled with the rows that arrive."""
        if len(arriving) == 1:
            _, arrival = arriving[0]
            return arrival()  # a single transfer fills the whole buffer
        buffer = _empty(self._local, length)
        for rows, arrival in arriving:
            for target, source in zip(buffer, arrival(), strict=True):
                for (first, end), part in _parts(rows, source):
                    target[:, first:end] = part
        return buffer

    def _finish(self, index: int) -> None:
        """Wait for the sends that are due by round ``index``, and free their buffers.

        A send of operands is awaited when it is due; a send of gradients when it is due, but at
        most two rounds after it began. So the rank in the earliest round waits only for transfers
        that its peers have posted, and ranks cannot wait for each other in a circle.
        """
        remaining = []
        for until, sent in self._sent:
            if until <= index:
                sent()
            else:
                remaining.append((until, sent))
        self._sent = remaining


def _rows_of(tensors: Tensors, rows: Rows) -> Tensors:
    """Return the given rows of each tensor, in this order."""
    if len(rows) == 1:
        ((first, end),) = rows
        return tuple(x[:, first:end] for x in tensors)
    return tuple(torch.cat([x[:, first:end] for first, end in rows], 1) for x in tensors)


def _empty(like: Tensors, length: int) -> Tensors:
    """Allocate tensors of the same shapes and dtypes as ``like``, but with ``length`` rows."""
    return tuple(x.new_empty(x.shape[0], length, *x.shape[2:]) for x in like)


def _add(sums: Tensors, rows: Rows, parts: Tensors) -> None:
    """Add ``parts`` to the ``rows`` of ``sums``; ``parts`` contains only these rows."""
    for total, source in zip(sums, parts, strict=True):
        for (first, end), part in _parts(rows, source):
            total[:, first:end] += part


def _parts(rows: Rows, x: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield each interval of ``rows`` with its part of x, in which the parts lie back to back."""
    return zip(rows, x.split([end - first for first, end in rows], 1), strict=True)
