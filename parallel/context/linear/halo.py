"""Short causal convolution over several ranks: a segment that continues a document gets the rows
before it.

These rows, its halo, travel while every rank convolves its own; then the first outputs of the
segment are computed again with them, to the same bits as in one process. The backward sends the
halo's gradient home first. Shapes: x ``[B, T, C]``, weight ``[C, K]``, T local positions; a halo
has K - 1 rows.
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
from parallel.context.transport import Transport
from runtime.tensors import Handles, accum_dtype


class Part(NamedTuple):
    """Consecutive rows that go to or come from one rank."""

    peer: int
    rows: slice
    """Tokens of the rank, or rows among all its halos."""


class Halo(NamedTuple):
    """One rank's part in the exchange of rows."""

    continued: tuple[Segment, ...]
    """Its segments that need rows, in the order of their halos."""
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]


@lru_cache(maxsize=256)
def halos(plan: Plan, reach: int) -> tuple[Halo, ...]:
    """Return the part of each rank where a token reads ``reach`` tokens before it; raises as
    ``chains``.

    A halo has several owners where the segments before are shorter than it.
    """
    continued: list[list[Segment]] = [[] for _ in range(plan.size)]
    sends: list[list[Part]] = [[] for _ in range(plan.size)]
    receives: list[list[Part]] = [[] for _ in range(plan.size)]
    for chain in cut(plan):
        for segment in chain[1:]:
            end = reach * (len(continued[segment.rank]) + 1)
            continued[segment.rank].append(segment)
            missing = reach
            for source in reversed(chain[: segment.depth]):
                count = min(missing, source.length)
                if count:
                    sends[source.rank].append(Part(segment.rank, source.last(count)))
                    receives[segment.rank].append(Part(source.rank, slice(end - count, end)))
                missing, end = missing - count, end - count
    return tuple(
        Halo(tuple(a), tuple(b), tuple(c))
        for a, b, c in zip(continued, sends, receives, strict=True)
    )


def halo_traffic(plan: Plan, rank: int, taps: int, row: int, *, gradient: bool) -> Traffic:
    """Return the bytes that ``rank`` sends in a convolution of ``taps``, or (``gradient``) in its
    backward.

    ``row`` is the bytes of a token's channels, those of its gradient, which is in float32 or wider.
    """
    halo, sent = halos(plan, taps - 1)[rank], Traffic()
    for part in halo.receives if gradient else halo.sends:
        if part.peer != rank:
            sent.p2p[part.peer] += (part.rows.stop - part.rows.start) * row
    return sent


@dataclass(eq=False)
class Convolution:
    """The convolution of one rank, for any plan of one geometry whose ranks hold consecutive
    tokens.
    """

    transport: Transport

    def __post_init__(self) -> None:
        self.handle, self.rank = CONVOLUTIONS.add(self), self.transport.rank

    def forward(self, plan: Plan, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return out like x, zero in padding, and the halos ``[B, rows, C]``, one after the other."""
        reach = weight.shape[1] - 1
        halo, bounds = halos(plan, reach)[self.rank], self._bounds(plan)
        arrivals = self._exchange(x, halo.sends, halo.receives)
        out, arrived = (
            x.new_zeros(x.shape),
            x.new_zeros(x.shape[0], reach * len(halo.continued), x.shape[2]),
        )
        rows, at = spaced(x[:, : bounds[-1]], bounds, reach)
        out[:, : bounds[-1]] = convolve(rows, weight).index_select(1, at)
        for part, found in arrivals():
            arrived[:, part.rows] = found
        for before, gap, first in self._gaps(plan, halo, reach):
            rows[:, gap] = arrived[:, before]
            again = rows[:, gap.start : gap.stop + first.stop - first.start]
            out[:, first] = convolve(again, weight)
        return out, arrived

    def backward(
        self, plan: Plan, dout: Tensor, arrived: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x, zero in padding, and of weight; ``arrived`` is what forward
        returned.
        """
        reach, wide = weight.shape[1] - 1, accum_dtype(x.dtype)
        halo, bounds = halos(plan, reach)[self.rank], self._bounds(plan)
        darrived = torch.zeros_like(arrived, dtype=wide)
        for before, _, first in self._gaps(plan, halo, reach):
            late = dout[:, first].to(wide)
            late = F.pad(late, (0, 0, reach, reach - late.shape[1]))
            darrived[:, before] = convolve(late, weight.flip(1))
        arrivals = self._exchange(darrived, halo.receives, halo.sends)
        rows, at = spaced(x[:, : bounds[-1]], bounds, reach)
        for before, gap, _ in self._gaps(plan, halo, reach):
            rows[:, gap] = arrived[:, before]
        drows = spaced(dout[:, : bounds[-1]], bounds, reach)[0][:, reach:]
        drows, dweight = convolve_backward(drows, rows, weight)
        dx = x.new_zeros(x.shape)
        dx[:, : bounds[-1]] = drows.index_select(1, at + reach)
        ends: dict[int, Tensor] = {}  # gradients of the rows that others read, to be rounded once
        for part, found in arrivals():  # of a segment's last rows the most come first
            end = part.rows.stop
            if end not in ends:
                ends[end] = convolve(
                    F.pad(dout[:, part.rows].to(wide), (0, 0, 0, reach)), weight.flip(1)
                )
            ends[end][:, -found.shape[1] :] += found
        for end, whole in ends.items():
            dx[:, end - whole.shape[1] : end] = whole
        return dx, dweight

    def _bounds(self, plan: Plan) -> tuple[int, ...]:
        """Return the cumulative lengths of this rank's segments, without padding, which comes last."""
        real = (
            segment.length for segment in segments(plan)[self.rank] if segment.start < plan.seq_len
        )
        return tuple(accumulate(real, initial=0))

    def _gaps(self, plan: Plan, halo: Halo, reach: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield for each continued segment its halo's rows, the gap for them, and its tokens that
        read them.
        """
        numbers = {segment: number for number, segment in enumerate(segments(plan)[self.rank])}
        for index, segment in enumerate(halo.continued):
            start = segment.offset + reach * numbers[segment]
            first = slice(segment.offset, segment.offset + min(reach, segment.length))
            yield slice(reach * index, reach * (index + 1)), slice(start, start + reach), first

    def _exchange(
        self, x: Tensor, sends: tuple[Part, ...], receives: tuple[Part, ...]
    ) -> Callable[[], list[tuple[Part, Tensor]]]:
        """Start sending rows of x; return a function that waits for all, and returns what came."""
        self.transport.connect_all(x.device)
        buffers = [
            x.new_empty(x.shape[0], part.rows.stop - part.rows.start, x.shape[2])
            for part in receives
        ]
        arrivals, sent = self.transport.isend_irecv(
            [(part.peer, (x[:, part.rows],)) for part in sends],
            [(part.peer, (buffer,)) for part, buffer in zip(receives, buffers, strict=True)],
            far=False,
        )

        def wait() -> list[tuple[Part, Tensor]]:
            found = [(part, arrival()[0]) for part, arrival in zip(receives, arrivals, strict=True)]
            sent()
            return found

        return wait


CONVOLUTIONS: Handles[Convolution] = Handles()
