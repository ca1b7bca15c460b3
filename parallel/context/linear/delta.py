"""Executor of the gated delta rule over segments on several ranks.

A segment maps its incoming state S to M S + U, and adds Q S to the outputs that it has without S
(kernels/delta/rule.py). So a segment that continues a document is computed before S arrives, by a
wider scan. When S arrives only one matmul remains, and U + M S is sent on at once, unless the map
itself was sent earlier (segments.py). The gradient of S is M^T dS' + Q^T dout, passed back along
the chain. Only segments in the middle of a document need the wider scan: a segment that begins a
document knows its state, and one that ends a document is computed last, unless it has most of its
rank's tokens.

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
from parallel.context.linear.segments import (
    RankParts,
    ScanPart,
    StateMessage,
    chains,
    cut,
    parts,
    rounds_of,
)
from parallel.context.plan import Plan
from parallel.context.transport import Arrival, Tensors, Transport
from runtime.tensors import Handles, accum_dtype

MAX_WAVES = 4
"""Maximum number of head groups that take turns: the states of one travel while another computes.
"""

SavedParts = dict[ScanPart, list[Tensor]]
"""Tensors that each part's backward needs: its states and, for an eager part, Q and M."""


class Wave(NamedTuple):
    """A group of heads whose states pass together."""

    parts: RankParts
    inputs: Tensors
    """q, k, v, g and beta of the group's heads."""
    outputs: Tensors
    """The group's heads of out or, in a backward pass, of dout and of the inputs' gradients."""
    posted: list[Arrival]
    """Receives that were posted before the first wave, so that states arrive while earlier waves
    compute; empty if there are none."""


@dataclass(eq=False)
class DeltaExecutor:
    """The gated delta rule of one rank, for any plan of one geometry.

    The geometry's ranks must hold consecutive tokens.
    """

    transport: Transport
    backend: str = "auto"
    """Name of a backend, as for ``select_delta_backend``; ``triton`` and backends that only support
    softmax attention mean ``auto``.
    """

    def __post_init__(self) -> None:
        if self.backend == "triton" or self.backend not in LINEAR:
            self.backend = "auto"
        self.handle = DELTA_EXECUTORS.add(self)
        self.rank = self.transport.rank

    def _waves(
        self, plan: Plan, inputs: Tensors, *outputs: Tensor, gradient: bool
    ) -> Iterator[Wave]:
        """Split inputs and outputs ``[B, T, heads, ..]`` into groups of heads that take turns.

        If each document that is cut lies on two ranks, only the first group computes the end of
        such a document eagerly (before its state arrives). The states of the other groups arrive
        meanwhile, in buffers that are posted at the start. On a GPU all heads are one group, since
        smaller groups would not fill it.
        """
        groups = _num_groups(plan, inputs[0])
        num_inputs = len(inputs)
        chunks = [x.chunk(groups, 2) for x in (*inputs, *outputs)]
        tensors_of_group = list(zip(*chunks, strict=True))  # views of [B, T, heads / groups, ...]

        posted: list[list[Arrival]] = [[] for _ in range(groups)]
        steps = rounds_of(plan, self.rank, gradient=gradient)
        if groups > 1 and steps:
            ((_, receives),) = steps
            for number, tensors in enumerate(tensors_of_group):
                buffers = [_receive_buffers(message, tensors[:num_inputs]) for message in receives]
                posted[number], _ = self.transport.isend_irecv([], buffers, far=False)

        for number, tensors in enumerate(tensors_of_group):
            yield Wave(
                parts=parts(plan, self.rank, waits=number > 0),
                inputs=tensors[:num_inputs],
                outputs=tensors[num_inputs:],
                posted=posted[number],
            )

    def forward(self, plan: Plan, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, E]`` in v's dtype, and one flat tensor that the backward needs.

        That tensor has, for each part, the states before each of its slabs (ranges of chunks) and
        after the part, and Q and M of an eager part. It is flat, since an operator returns a fixed
        number of tensors, but the parts depend on the documents.
        """
        v = tensors[2]
        out = v.new_zeros(v.shape)
        saved: list[Tensor] = []
        for wave in self._waves(plan, tensors, out, gradient=False):
            saved += self._forward(plan, wave)
        return out, torch.cat(saved) if saved else v.new_empty(0, dtype=accum_dtype(v.dtype))

    def _forward(self, plan: Plan, wave: Wave) -> list[Tensor]:
        """Write the outputs of one head group, and return the tensors that its backward needs."""
        (out,) = wave.outputs
        q, _, v, _, _ = wave.inputs
        widths = [v.shape[-1], q.shape[-1]]
        saved: SavedParts = {}
        scans: dict[ScanPart, tuple[Tensor, Tensor, Tensor]] = {}

        def compute(part: ScanPart, state: Tensor | None = None) -> Tensor:
            part_out, states = rule.scan(*part.inputs(wave.inputs), state, backend=self.backend)
            part.put(out, part_out)
            saved[part] = [states]
            return states[-1]

        @cache
        def local_map(part: ScanPart) -> Tensors:
            """Return the map (U, M) of a part, or (U,) if the part begins its document."""
            if not part.is_eager:
                return (compute(part),)
            # The columns of a wide scan's state are those of U, then those of M.
            scans[part] = rule.wide_scan(*part.inputs(wave.inputs), backend=self.backend)
            _, _, states = scans[part]
            return states[-1].split(widths, -1)

        def enter(part: ScanPart, state: Tensor) -> None:
            """Add the contribution of the incoming state to the outputs of a part."""
            if not part.is_eager:
                compute(part, state)
                return
            part_out, reads, states = scans.pop(part)
            added, through = states.split(widths, -1)
            part.put(out, part_out.add_(torch.einsum("bthd,bhde->bthe", reads, state)))
            saved[part] = [added + through @ state, reads, through[-1]]

        self._pass(plan, wave, local_map, compute, enter, gradient=False)

        rows = []
        for part in wave.parts.all:
            for x in saved[part]:
                rows.append(x.flatten())
        return rows

    def final(self, plan: Plan, saved: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the state after the last document on the rank where it ends; zeros on other ranks.

        ``saved`` is the flat tensor that ``forward`` returned.
        """
        real_chains = [chain for chain in chains(plan) if chain[0].start < plan.seq_len]
        last_segment = real_chains[-1][-1]
        final_states = []
        groups = _num_groups(plan, k)

        for number, heads in enumerate(zip(k.chunk(groups, 2), v.chunk(groups, 2), strict=True)):
            # The flat saved tensor has one head group after the other.
            group_parts = parts(plan, self.rank, waits=number > 0)
            saved_parts, saved = _unpacked(group_parts, saved, *heads)
            for part, (states, *_) in saved_parts.items():
                if part.segments[-1] == last_segment:
                    final_states.append(states[-1])

        if final_states:
            return torch.cat(final_states, 1)
        return torch.zeros_like(rule.empty_states(k[:, :1], v[:, :1])[0])

    def backward(self, plan: Plan, dout: Tensor, saved: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Return dq, dk, dv, dg and dbeta in the dtypes of the inputs."""
        gradients = [x.new_zeros(x.shape) for x in tensors]
        last: list[Callable[[], None]] = []
        for wave in self._waves(plan, tensors, dout, *gradients, gradient=True):
            saved_parts, saved = _unpacked(wave.parts, saved, *wave.inputs[1:3])
            last.append(self._backward(plan, wave, saved_parts))
        for compute_ends in last:
            compute_ends()
        return gradients

    def _backward(self, plan: Plan, wave: Wave, saved: SavedParts) -> Callable[[], None]:
        """Write the gradients of one head group, except those that no other rank waits for.

        Returns a function that writes the rest: the gradients of eager parts that end a document.
        It is called after the passes of all waves, so that no rank waits for it.
        """
        dout, *input_gradients = wave.outputs

        def compute(part: ScanPart, dfinal: Tensor | None = None) -> Tensor:
            states = saved[part][0]
            *part_gradients, dstate = rule.backward(
                part.inputs(wave.inputs), states, part.of(dout), dfinal, backend=self.backend
            )
            for dx, gradient in zip(input_gradients, part_gradients, strict=True):
                part.put(dx, gradient)
            return dstate

        @cache
        def local_map(part: ScanPart) -> Tensors:
            if not part.is_eager:
                return (compute(part),)
            _, reads, through = saved[part]
            added = torch.einsum("bthd,bthe->bhde", reads, part.of(dout).to(reads.dtype))
            if part.link.next_rank is None:
                return (added,)
            return added, through.transpose(-1, -2)

        entered: dict[ScanPart, Tensor] = {}
        self._pass(plan, wave, local_map, compute, entered.__setitem__, gradient=True)
        for part, dfinal in entered.items():
            compute(part, dfinal)

        def compute_ends() -> None:
            for part in wave.parts.eager:
                if part.link.next_rank is None:
                    compute(part)

        return compute_ends

    def _pass(
        self,
        plan: Plan,
        wave: Wave,
        local_map: Callable[[ScanPart], Tensors],
        compute: Callable[[ScanPart], object],
        enter: Callable[[ScanPart, Tensor], None],
        *,
        gradient: bool,
    ) -> None:
        """Pass states (or gradients) between ranks in rounds, and compute meanwhile.

        Args:
            local_map: returns the map of a part, (U, M), or (U,) for a part that begins its chain.
            compute: computes the part whose documents lie only on this rank.
            enter: takes a part and its incoming state; called after the sends that others wait for.
        """
        part_of = {part.link: part for part in wave.parts.all}
        maps_before: dict[ScanPart, Tensors] = {}
        due: dict[ScanPart, Tensor] = {}
        waits: list[Callable[[], object]] = []

        def work_meanwhile() -> None:
            for part in wave.parts.eager:
                local_map(part)
            for part in wave.parts.whole:
                compute(part)

        self.transport.connect_all(wave.inputs[0].device)
        steps = rounds_of(plan, self.rank, gradient=gradient)
        if not steps:
            work_meanwhile()
        for index, (leaving, coming) in enumerate(steps):
            sends = []
            for message in leaving:
                part = part_of[message.source]
                state_map = local_map(part)
                if part in maps_before:
                    state_map = _composed(maps_before[part], state_map)
                sends.append((message.peer, state_map))

            receives = []
            if not wave.posted:
                receives = [_receive_buffers(message, wave.inputs) for message in coming]
            arrivals, sent = self.transport.isend_irecv(sends, receives, far=False)
            waits.append(sent)

            if index == 0:
                work_meanwhile()
            for part, state in due.items():
                enter(part, state)
            due.clear()

            # A new map covers segments before those of the maps that arrived earlier: compose them.
            # A map of U alone is the state itself, so the part can continue.
            for message, arrival in zip(coming, wave.posted or arrivals, strict=True):
                part = part_of[message.target]
                earlier = arrival()
                if part in maps_before:
                    earlier = _composed(earlier, maps_before[part])
                maps_before[part] = earlier
                if len(earlier) == 1:
                    due[part] = earlier[0]
        for part, state in due.items():
            enter(part, state)
        for sent in waits:
            sent()


def _composed(earlier: Tensors, later: Tensors) -> Tensors:
    """Compose the maps (U, M) of two stretches; return (U,) if the earlier one begins the chain."""
    added, through = later
    first, *rest = (through @ x for x in earlier)
    return added + first, *rest


def _receive_buffers(message: StateMessage, tensors: Tensors) -> tuple[int, Tensors]:
    """Return the rank that sends a message, and buffers for its matrices."""
    q, _, v, _, _ = tensors
    widths = [v.shape[-1]]
    if not message.state:
        widths.append(q.shape[-1])
    shape = (v.shape[0], v.shape[2], q.shape[-1])
    dtype = accum_dtype(q.dtype)
    return message.source.rank, tuple(v.new_empty(*shape, width, dtype=dtype) for width in widths)


def _num_groups(plan: Plan, q: Tensor) -> int:
    """Return the number of head groups that take turns.

    It is more than 1 only on a CPU, and only if every document that is cut has two segments on two
    ranks: then there is one round, and all receives can be posted before it.
    """
    if q.device.type != "cpu" or not cut(plan):
        return 1
    for chain in cut(plan):
        ranks = {segment.rank for segment in chain}
        if len(chain) != 2 or len(ranks) != 2:
            return 1
    return max(n for n in range(1, MAX_WAVES + 1) if q.shape[2] % n == 0)


def _unpacked(
    rank_parts: RankParts, saved: Tensor, k: Tensor, v: Tensor
) -> tuple[SavedParts, Tensor]:
    """Split a flat saved tensor into the tensors of one head group's parts, and the rest.

    Shapes follow from the parts alone, so the flat tensor needs no header.
    """
    shapes = []
    for part in rank_parts.all:
        keys = part.of(k)
        values = part.of(v)
        states = rule.empty_states(keys, values).shape
        key_dim = keys.shape[-1]
        shapes.append((part, states))
        if part.is_eager:
            shapes.append((part, torch.Size((*values.shape[:3], key_dim))))
            shapes.append((part, torch.Size((*states[1:3], key_dim, key_dim))))

    sizes = [shape.numel() for _, shape in shapes]
    *pieces, rest = saved.split([*sizes, len(saved) - sum(sizes)])

    saved_parts = defaultdict[ScanPart, list[Tensor]](list)
    for (part, shape), piece in zip(shapes, pieces, strict=True):
        saved_parts[part].append(piece.view(shape))
    return saved_parts, rest


DELTA_EXECUTORS: Handles[DeltaExecutor] = Handles()
