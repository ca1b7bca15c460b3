"""Executor of the gated delta rule over segments on several ranks.

A segment maps its incoming state S to M S + U, and adds Q S to the outputs that it has without
(kernels/delta/rule.py). So one that continues a document is computed before S arrives: one product
is left, and U + M S goes on at once, or the map itself did earlier (segments.py). The gradient of S
is M^T dS' + Q^T dout, passed back along the chain. Only segments in the middle of a document take
that wider scan: one that begins it knows its state, one that ends it is computed last, unless it is
most of its rank.

Shapes as in ``kernels.delta.rule``, with T local positions; states in float32 (float64 for
float64).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import LINEAR
from kernels.delta import rule
from parallel.context.linear.segments import Message, Part, Parts, chains, cut, parts, rounds_of
from parallel.context.plan import Plan
from parallel.context.transport import Arrival, Tensors, Transport
from runtime.tensors import Handles, accum_dtype

MOST_WAVES = 4
"""Groups of heads at most that take their turns."""


class Wave(NamedTuple):
    """A group of heads whose states pass together."""

    parts: Parts
    inputs: Tensors
    """q, k, v, g and beta of its heads."""
    more: Tensors
    posted: list[Arrival]
    """Receives of the only round, if they were started before; else none."""


@dataclass(eq=False)
class DeltaExecutor:
    """The gated delta rule of one rank, for any plan of one geometry whose ranks hold consecutive
    tokens.
    """

    transport: Transport
    backend: str = "auto"
    """As for ``select_delta_backend``; that of softmax attention, its Triton kernel too, leaves it
    to ``auto``.
    """

    def __post_init__(self) -> None:
        if self.backend == "triton" or self.backend not in LINEAR:
            self.backend = "auto"
        self.handle, self.rank = DELTA_EXECUTORS.add(self), self.transport.rank

    def _waves(self, plan: Plan, inputs: Tensors, *more: Tensor, gradient: bool) -> Iterator[Wave]:
        """Cut inputs and more tensors ``[B, T, heads, ..]`` into groups of heads that take their
        turns.

        Where each document that ranks share ends on the second of two, only the first group's end
        is wide: the states of the others arrive meanwhile, into what is posted at once. On a GPU
        all heads are one group: smaller ones would not fill it.
        """
        groups = _groups(plan, inputs[0])
        count, steps = len(inputs), rounds_of(plan, self.rank, gradient=gradient)
        heads = list(zip(*(x.chunk(groups, 2) for x in (*inputs, *more)), strict=True))
        posted: list[list[Arrival]] = [[] for _ in heads]
        if groups > 1 and steps:
            ((_, coming),) = steps
            for arrivals, x in zip(posted, heads, strict=True):
                buffers = [_receive_buffers(message, x[:count]) for message in coming]
                arrivals += self.transport.isend_irecv([], buffers, far=False)[0]
        for number, (x, arrivals) in enumerate(zip(heads, posted, strict=True)):
            yield Wave(parts(plan, self.rank, waits=number > 0), x[:count], x[count:], arrivals)

    def forward(self, plan: Plan, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, E]`` in v's dtype, and in one row what the backward of each part
        of ``parts`` needs.

        These are the states before each of the part's slabs and after it and, of a wide one, Q and
        M.
        """
        v = tensors[2]
        out, row = v.new_zeros(v.shape), list[Tensor]()
        for wave in self._waves(plan, tensors, out, gradient=False):
            row += self._forward(plan, wave)
        return out, torch.cat(row) if row else v.new_empty(0, dtype=accum_dtype(v.dtype))

    def _forward(self, plan: Plan, wave: Wave) -> list[Tensor]:
        """Write the outputs of a wave's heads, and return what their backward needs."""
        tensors, (out,) = wave.inputs, wave.more
        q, _, v, _, _ = tensors
        kept, scans = dict[Part, list[Tensor]](), dict[Part, tuple[Tensor, Tensor, Tensor]]()

        def compute(part: Part, state: Tensor | None = None) -> Tensor:
            found, states = rule.scan(*part.inputs(tensors), state, backend=self.backend)
            part.put(out, found)
            kept[part] = [states]
            return states[-1]

        @cache
        def own(part: Part) -> Tensors:
            if not part.wide:
                return (compute(part),)
            scans[part] = rule.wide_scan(*part.inputs(tensors), backend=self.backend)
            return scans[part][2][-1].split([v.shape[-1], q.shape[-1]], -1)

        def enter(part: Part, state: Tensor) -> None:
            if not part.wide:
                compute(part, state)
                return
            found, reads, states = scans.pop(part)
            added, through = states.split([v.shape[-1], q.shape[-1]], -1)
            part.put(out, found.add_(torch.einsum("bthd,bhde->bthe", reads, state)))
            kept[part] = [added + through @ state, reads, through[-1]]

        self._pass(plan, wave, own, compute, enter, gradient=False)
        return [x.flatten() for part in wave.parts.all for x in kept[part]]

    def final(self, plan: Plan, kept: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the state after the last document where that ends, zeros elsewhere; ``kept`` is
        forward's row.
        """
        last, found = (
            [chain for chain in chains(plan) if chain[0].start < plan.seq_len][-1][-1],
            list[Tensor](),
        )
        groups = _groups(plan, k)
        for number, heads in enumerate(zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True)):
            saved, kept = _unpacked(parts(plan, self.rank, waits=number > 0), kept, *heads)
            found += [
                states[-1] for part, (states, *_) in saved.items() if part.segments[-1] == last
            ]
        return (
            torch.cat(found, 1)
            if found
            else torch.zeros_like(rule.empty_states(k[:, :1], v[:, :1])[0])
        )

    def backward(self, plan: Plan, dout: Tensor, kept: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Return dq, dk, dv, dg and dbeta in the dtypes of the inputs."""
        gradients, last = [x.new_zeros(x.shape) for x in tensors], list[Callable[[], None]]()
        for wave in self._waves(plan, tensors, dout, *gradients, gradient=True):
            saved, kept = _unpacked(wave.parts, kept, *wave.inputs[1:3])
            last.append(self._backward(plan, wave, saved))
        for compute in last:
            compute()
        return gradients

    def _backward(
        self, plan: Plan, wave: Wave, saved: dict[Part, list[Tensor]]
    ) -> Callable[[], None]:
        """Write the gradients of a wave's heads; the function returned writes those that no other
        rank waits for.
        """
        dout, *found = wave.more

        def compute(part: Part, dfinal: Tensor | None = None) -> Tensor:
            taken = part.inputs(wave.inputs), saved[part][0], part.of(dout), dfinal
            *gradients, dstate = rule.backward(*taken, backend=self.backend)
            for dx, gradient in zip(found, gradients, strict=True):
                part.put(dx, gradient)
            return dstate

        @cache
        def own(part: Part) -> Tensors:
            if not part.wide:
                return (compute(part),)
            _, reads, through = saved[part]
            reached = torch.einsum("bthd,bthe->bhde", reads, part.of(dout).to(reads.dtype))
            return (reached,) if part.link.after is None else (reached, through.transpose(-1, -2))

        entered = dict[Part, Tensor]()
        self._pass(plan, wave, own, compute, entered.__setitem__, gradient=True)
        for part, dfinal in entered.items():
            compute(part, dfinal)

        def ends() -> None:
            for part in wave.parts.wide:
                if part.link.after is None:
                    compute(part)

        return ends

    def _pass(
        self,
        plan: Plan,
        wave: Wave,
        own: Callable[[Part], Tensors],
        compute: Callable[[Part], object],
        enter: Callable[[Part, Tensor], None],
        *,
        gradient: bool,
    ) -> None:
        """Pass states on in rounds, or their gradients back, and work while the first are on their
        way.

        Args:
            own: returns the map of a part, (U, M), or (U,) of the one that begins the chain.
            compute: does the part of whole documents.
            enter: takes a part and its incoming state; called when what others wait for has left.
        """
        mine = wave.parts
        placed = {part.link: part for part in mine.all}
        known, due, waits = dict[Part, Tensors](), dict[Part, Tensor](), []

        def meanwhile() -> None:
            for part in mine.wide:
                own(part)
            for part in mine.whole:
                compute(part)

        self.transport.connect_all(wave.inputs[0].device)
        steps = rounds_of(plan, self.rank, gradient=gradient)
        if not steps:
            meanwhile()
        for index, (leaving, coming) in enumerate(steps):
            sends = []
            for message in leaving:
                part = placed[message.source]
                sends.append(
                    (
                        message.peer,
                        _composed(known[part], own(part)) if part in known else own(part),
                    )
                )
            receives = (
                []
                if wave.posted
                else [_receive_buffers(message, wave.inputs) for message in coming]
            )
            arrivals, sent = self.transport.isend_irecv(sends, receives, far=False)
            waits.append(sent)
            if index == 0:
                meanwhile()
            for part, state in due.items():
                enter(part, state)
            due.clear()
            for message, arrival in zip(coming, wave.posted or arrivals, strict=True):
                part, earlier = placed[message.target], arrival()
                known[part] = _composed(earlier, known[part]) if part in known else earlier
                if len(known[part]) == 1:
                    due[part] = known[part][0]
        for part, state in due.items():
            enter(part, state)
        for sent in waits:
            sent()


def _composed(earlier: Tensors, later: Tensors) -> Tensors:
    """Return the map of two stretches in sequence, (U, M), or (U,) if the earlier begins the chain."""
    added, through = later
    found = (through @ x for x in earlier)
    return added + next(found), *found


def _receive_buffers(message: Message, tensors: Tensors) -> tuple[int, Tensors]:
    """Return the rank that sends a message, and matrices to receive it in."""
    q, _, v, _, _ = tensors
    shape, wide = (v.shape[0], v.shape[2], q.shape[-1]), accum_dtype(q.dtype)
    widths = (v.shape[-1], q.shape[-1])[: 2 - message.state]
    return message.source.rank, tuple(v.new_empty(*shape, width, dtype=wide) for width in widths)


def _groups(plan: Plan, q: Tensor) -> int:
    """Return the groups of heads that take their turns."""
    shared = cut(plan)
    pairs = all(len(chain) == 2 == len({segment.rank for segment in chain}) for chain in shared)
    turns = shared and pairs and q.device.type == "cpu"
    return next(n for n in range(MOST_WAVES, 0, -1) if q.shape[2] % n == 0) if turns else 1


def _unpacked(
    mine: Parts, kept: Tensor, k: Tensor, v: Tensor
) -> tuple[dict[Part, list[Tensor]], Tensor]:
    """Return what was kept of each part of a wave's heads, and the rest of the row."""
    shapes = []
    for part in mine.all:
        keys, values = part.of(k), part.of(v)
        states, width = rule.empty_states(keys, values).shape, keys.shape[-1]
        shapes.append((part, states))
        if part.wide:
            shapes += [
                (part, torch.Size((*values.shape[:3], width))),
                (part, torch.Size((*states[1:3], width, width))),
            ]
    sizes = [shape.numel() for _, shape in shapes]
    *pieces, rest = kept.split([*sizes, len(kept) - sum(sizes)])
    saved = defaultdict[Part, list[Tensor]](list)
    for (part, shape), piece in zip(shapes, pieces, strict=True):
        saved[part].append(piece.view(shape))
    return saved, rest


DELTA_EXECUTORS: Handles[DeltaExecutor] = Handles()
