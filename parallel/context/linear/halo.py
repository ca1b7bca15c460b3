"""Short causal convolution over several ranks: segments receive the rows before them.

A segment that continues a document needs these rows, its halo. They travel while every rank
convolves its own rows; then the segment's first outputs are computed again with the halo, to the
same bits as in one process. The backward pass first sends the halo's gradient to the halo's owners,
since they wait for it. Shapes: x ``[B, T, C]``, weight ``[C, K]``, T local positions; a halo has
K - 1 rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.delta.convolution import spaced
from kernels.ops import convolve, convolve_backward
from parallel.context.linear.segments import Segment, cut, segments
from parallel.context.plan import Plan
from parallel.context.traffic import Traffic
from parallel.context.transport import Tensors, Transport
from runtime.tensors import Handles, accum_dtype


class HaloRows(NamedTuple):
    """Consecutive rows that are sent to or received from one rank."""

    peer: int
    rows: slice
    """In a send, local indices of tokens that another rank reads; in a receive, indices among the
    rows of all halos of this rank."""

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start


class Halo(NamedTuple):
    """One rank's part in the exchange of halo rows."""

    continued: tuple[Segment, ...]
    """Segments of this rank that need a halo, in the order of their halos."""
    sends: tuple[HaloRows, ...]
    receives: tuple[HaloRows, ...]


@lru_cache(maxsize=256)
def halos(plan: Plan, reach: int) -> tuple[Halo, ...]:
    """Return each rank's part in the exchange, if a token reads ``reach`` tokens before itself.

    A halo has several owners if the segment before it is shorter than the halo. Raises the errors
    of ``chains``.
    """
    continued: list[list[Segment]] = [[] for _ in range(plan.size)]
    sends: list[list[HaloRows]] = [[] for _ in range(plan.size)]
    receives: list[list[HaloRows]] = [[] for _ in range(plan.size)]
    for chain in cut(plan):
        for segment in chain[1:]:
            # Fill the halo from its end: the nearest earlier segment comes first.
            end = reach * (len(continued[segment.rank]) + 1)
            continued[segment.rank].append(segment)
            missing = reach
            for source in reversed(chain[: segment.depth]):
                count = min(missing, source.length)
                if count:
                    rows = slice(end - count, end)
                    sends[source.rank].append(HaloRows(segment.rank, source.last(count)))
                    receives[segment.rank].append(HaloRows(source.rank, rows))
                missing -= count
                end -= count

    by_rank = []
    for rank in range(plan.size):
        by_rank.append(Halo(tuple(continued[rank]), tuple(sends[rank]), tuple(receives[rank])))
    return tuple(by_rank)


def halo_traffic(plan: Plan, rank: int, taps: int, row: int, *, gradient: bool) -> Traffic:
    """Return the bytes that ``rank`` sends in the forward or backward pass of a convolution.

    The convolution has ``taps`` taps. ``row`` is the number of bytes of a token's channels or, with
    ``gradient`` (the backward pass), of their gradient, which is in float32 or wider.
    """
    halo = halos(plan, taps - 1)[rank]
    traffic = Traffic()
    for part in halo.receives if gradient else halo.sends:
        if part.peer != rank:
            traffic.p2p[part.peer] += part.num_rows * row
    return traffic


@dataclass(eq=False)
class Convolution:
    """The convolution of one rank, for any plan of one geometry.

    The geometry's ranks must hold consecutive tokens.
    """

    transport: Transport

    def __post_init__(self) -> None:
        self.handle = CONVOLUTIONS.add(self)
        self.rank = self.transport.rank

    def forward(self, plan: Plan, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return out like x, zero in padding, and this rank's halos ``[B, rows, C]``."""
        reach = weight.shape[1] - 1
        halo = halos(plan, reach)[self.rank]
        cu_seqlens = self._cu_seqlens(plan)
        num_tokens = cu_seqlens[-1]
        arrivals = self._exchange(x, halo.sends, halo.receives)
        out = x.new_zeros(x.shape)
        arrived = x.new_zeros(x.shape[0], reach * len(halo.continued), x.shape[2])

        # Lay all segments side by side, each after a gap of zeros for its halo.
        rows, indices = spaced(x[:, :num_tokens], cu_seqlens, reach)
        out[:, :num_tokens] = convolve(rows, weight).index_select(1, indices)

        # Only the first tokens of a continued segment read the halo.
        for part, values in arrivals():
            arrived[:, part.rows] = values
        for halo_rows, gap, first in self._gaps(plan, halo, reach):
            rows[:, gap] = arrived[:, halo_rows]
            with_halo = rows[:, gap.start : gap.stop + first.stop - first.start]
            out[:, first] = convolve(with_halo, weight)
        return out, arrived

    def backward(
        self, plan: Plan, dout: Tensor, arrived: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (zero in padding) and of weight.

        ``arrived`` has the halos that forward returned. The gradient of a row that other ranks read
        is a sum over ranks; it is summed in float32 or wider and rounded once.
        """
        reach = weight.shape[1] - 1
        dtype = accum_dtype(x.dtype)
        halo = halos(plan, reach)[self.rank]
        cu_seqlens = self._cu_seqlens(plan)
        num_tokens = cu_seqlens[-1]

        # Compute the gradients of the halos first, since other ranks wait for them.
        darrived = torch.zeros_like(arrived, dtype=dtype)
        for halo_rows, _, first in self._gaps(plan, halo, reach):
            readers = dout[:, first].to(dtype)
            readers = F.pad(readers, (0, 0, reach, reach - readers.shape[1]))
            # The gradient of a convolution's input is a convolution with the weight reversed.
            darrived[:, halo_rows] = convolve(readers, weight.flip(1))
        arrivals = self._exchange(darrived, halo.receives, halo.sends)

        # Meanwhile, compute this rank's own gradients.
        rows, indices = spaced(x[:, :num_tokens], cu_seqlens, reach)
        for halo_rows, gap, _ in self._gaps(plan, halo, reach):
            rows[:, gap] = arrived[:, halo_rows]

        drows = spaced(dout[:, :num_tokens], cu_seqlens, reach)[0][:, reach:]
        drows, dweight = convolve_backward(drows, rows, weight)

        dx = x.new_zeros(x.shape)
        dx[:, :num_tokens] = drows.index_select(1, indices + reach)

        # Several parts may end with a segment's last row; the longest part comes first.
        shared: dict[int, Tensor] = {}
        for part, gradient in arrivals():
            end = part.rows.stop
            if end not in shared:
                local_dout = F.pad(dout[:, part.rows].to(dtype), (0, 0, 0, reach))
                shared[end] = convolve(local_dout, weight.flip(1))
            shared[end][:, -gradient.shape[1] :] += gradient

        for end, gradient in shared.items():
            dx[:, end - gradient.shape[1] : end] = gradient
        return dx, dweight

    def _cu_seqlens(self, plan: Plan) -> tuple[int, ...]:
        """Return the cumulative lengths of this rank's segments, excluding padding."""
        lengths = []
        for segment in segments(plan)[self.rank]:
            if segment.start < plan.seq_len:
                lengths.append(segment.length)
        return tuple(accumulate(lengths, initial=0))

    def _gaps(self, plan: Plan, halo: Halo, reach: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield three slices for each continued segment.

        They select the segment's halo among all halos, the gap for the halo among the spaced rows,
        and, among this rank's tokens, those of the segment that read the halo.
        """
        numbers = {segment: number for number, segment in enumerate(segments(plan)[self.rank])}
        for index, segment in enumerate(halo.continued):
            halo_rows = slice(reach * index, reach * (index + 1))
            start = segment.offset + reach * numbers[segment]
            first = slice(segment.offset, segment.offset + min(reach, segment.length))
            yield halo_rows, slice(start, start + reach), first

    def _exchange(
        self, x: Tensor, sends: tuple[HaloRows, ...], receives: tuple[HaloRows, ...]
    ) -> Callable[[], list[tuple[HaloRows, Tensor]]]:
        """Start sending rows of x; return a function that waits and returns the rows received."""
        self.transport.connect_all(x.device)
        outgoing: list[tuple[int, Tensors]] = []
        for part in sends:
            outgoing.append((part.peer, (x[:, part.rows],)))

        buffers: list[tuple[int, Tensors]] = []
        for part in receives:
            buffers.append((part.peer, (x.new_empty(x.shape[0], part.num_rows, x.shape[2]),)))
        arrivals, sent = self.transport.isend_irecv(outgoing, buffers, far=False)

        def wait() -> list[tuple[HaloRows, Tensor]]:
            received = []
            for part, arrival in zip(receives, arrivals, strict=True):
                received.append((part, arrival()[0]))
            sent()
            return received

        return wait


CONVOLUTIONS: Handles[Convolution] = Handles()
