"""Executor of methods that pass states on: linear attention over several ranks.

A scan is linear in the incoming state (kernels/linear_attention.py), so a rank computes all but one
matrix product while the state is in transit. The backward reuses that state, so that dq needs no
other rank; the state's gradient goes the other way. States and sums are in float32 (float64 for
float64 inputs) and are cast once at the end. No check reads them, since that would wait for the
GPU: an overflow shows in every rank's gradient norm. A rank's tokens are one or more stretches of
consecutive ones (``Passage``), each with a slot among them. Shapes: q, k ``[B, T, H, D]``, v ``[B,
T, H, E]`` with T local positions, states ``[B, H, D, E]``, or ``[slots, ...]``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from kernels.backends.base import Scan
from kernels.linear_attention import (
    backward,
    decayed_state,
    from_state,
    scan_of,
    select_linear_backend,
)
from parallel.context.layout import Passage, passages
from parallel.context.plan import Plan
from parallel.context.transport import Arrival, Transport
from runtime.tensors import Handles, accum_dtype


@dataclass(eq=False)
class StateExecutor:
    """Linear attention of one rank, for any plan of one geometry that passes states on."""

    transport: Transport
    backend_name: str

    def __post_init__(self) -> None:
        self.handle = STATE_EXECUTORS.add(self)
        self.geometry, self.rank = self.transport.geometry, self.transport.rank

    def forward(
        self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, E]`` in v's dtype, and the state that enters each stretch, zero if
        there is none.
        """
        run, outs = self._scan(q), dict[int, Tensor]()

        def intra(way: Passage) -> Tensor:
            of = way.of
            outs[way.slot], local = run(
                of(q), of(k), of(v), log_decay, None, way.documents, accum_out=True
            )
            return local

        def alone(way: Passage) -> Tensor:
            return run(None, way.of(k), way.of(v), log_decay, None, way.documents)[1]

        def enter(way: Passage, state: Tensor) -> None:
            outs[way.slot] += from_state(way.of(q), state, log_decay, way.seen)

        like = empty_state(k, v)
        states = self._pass_states(plan, like, log_decay, intra, alone, enter)
        kept = like.new_zeros(len(outs), *like.shape)
        for slot, state in states.items():
            kept[slot] = state
        return _joined(outs).to(v.dtype), kept

    def backward(
        self,
        plan: Plan,
        dout: Tensor,
        states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Sequence[float],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv in float32 or wider; ``states`` are those that forward returned."""
        run, (dq, dk, dv) = (
            self._scan(q),
            (dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()),
        )
        entered = {
            way.slot for way in self._ways(plan) if way.rank == self.rank and way.source is not None
        }

        def intra(way: Passage) -> Tensor:
            of, state = way.of, states[way.slot] if way.slot in entered else None
            found = backward(
                run,
                of(dout),
                None,
                of(q),
                of(k),
                of(v),
                log_decay,
                state,
                way.documents,
                accum_out=True,
            )
            dq[way.slot], dk[way.slot], dv[way.slot], local = found
            return local

        def alone(way: Passage) -> Tensor:
            return run(None, way.of(q), way.of(dout), log_decay, None, way.documents, reverse=True)[
                1
            ]

        def enter(way: Passage, dstate: Tensor) -> None:
            dk[way.slot] += from_state(
                way.of(v), dstate.transpose(-1, -2), log_decay, way.seen, reverse=True
            )
            dv[way.slot] += from_state(way.of(k), dstate, log_decay, way.seen, reverse=True)

        self._pass_states(plan, empty_state(k, v), log_decay, intra, alone, enter, reverse=True)
        return _joined(dq), _joined(dk), _joined(dv)

    def _pass_states(
        self,
        plan: Plan,
        like: Tensor,
        log_decay: Sequence[float],
        intra: Callable[[Passage], Tensor],
        alone: Callable[[Passage], Tensor],
        enter: Callable[[Passage, Tensor], None],
        *,
        reverse: bool = False,
    ) -> dict[int, Tensor]:
        """Compute this rank's stretches, while the first state is in transit; return those that
        came in, by slot.

        Args:
            intra: computes a stretch on its own, and returns the state after it, from zero.
            alone: computes only that state.
            enter: adds what comes of an incoming state.
        """
        ways = self._ways(plan, reverse=reverse)
        mine = [way for way in ways if way.rank == self.rank]
        if self.geometry.method.states == "gather":
            local = torch.stack([alone(way) for way in sorted(mine, key=lambda way: way.slot)], 1)
            arrival = self.transport.gather(
                (local,), tuple(range(self.geometry.size)), by_rank=True
            )
            for way in mine:
                intra(way)
            (found,) = arrival()
            states = self._sum_before(found, log_decay, ways)
            for way in mine:
                if way.slot in states:
                    enter(way, states[way.slot])
            return states
        self.transport.connect_all(like.device)
        coming = self._receive(mine[0], like)
        onward = {way.slot: intra(way) for way in mine}
        states, waits, handed = dict[int, Tensor](), [], like
        for way, later in zip_longest(mine, mine[1:]):
            if way.source is not None:
                (states[way.slot],) = coming() if way.source != self.rank else (handed,)
            handed = onward.pop(way.slot)
            if way.target is not None and way.slot in states and way.goes_through:
                handed = handed + decayed_state(states[way.slot], log_decay, way.length)
            if way.target not in (None, self.rank):
                waits.append(
                    self.transport.isend_irecv([(way.target, (handed,))], [], far=False)[1]
                )
            coming = self._receive(later, like)
            if way.slot in states:
                enter(way, states[way.slot])
        for sent in waits:
            sent()
        return states

    def _receive(self, way: Passage | None, like: Tensor) -> Arrival:
        """Start to receive the state of a stretch, unless this rank has it or there is none.

        Only one is under way: a second would wait for what this rank sends, and a GPU's queue keeps
        their order.
        """
        if way is None or way.source in (None, self.rank):
            return lambda: ()
        return self.transport.isend_irecv([], [(way.source, (torch.empty_like(like),))], far=False)[
            0
        ][0]

    def _sum_before(
        self, states: Tensor, log_decay: Sequence[float], ways: tuple[Passage, ...]
    ) -> dict[int, Tensor]:
        """Sum the states ``[B, ranks * slots, H, D, E]`` before each stretch of this rank, by slot."""
        slots, found = self.geometry.slots, dict[int, Tensor]()
        last = [way for way in ways if way.rank == self.rank][-1]
        running = states[:, 0]
        for way in ways:
            before = running if way.source is not None else None
            if before is not None and way.rank == self.rank:
                found[way.slot] = before
            if way is last:
                break
            running = states[:, way.rank * slots + way.slot]
            if before is not None and way.goes_through:
                running = running + decayed_state(before, log_decay, way.length)
        return found

    def _ways(self, plan: Plan, *, reverse: bool = False) -> tuple[Passage, ...]:
        return passages(self.geometry.layout, plan.boundaries, reverse)

    def _scan(self, q: Tensor) -> Scan:
        return scan_of(select_linear_backend(self.backend_name, q.device.type, q.dtype))


def _joined(stretches: dict[int, Tensor]) -> Tensor:
    """Join tensors of a rank's stretches ``[B, T, ...]``, by slot."""
    return (
        torch.cat([stretches[slot] for slot in range(len(stretches))], 1)
        if len(stretches) > 1
        else stretches[0]
    )


def empty_state(k: Tensor, v: Tensor) -> Tensor:
    """Allocate a state, uninitialised."""
    wide = accum_dtype(k.dtype)
    return k.new_empty((k.shape[0], *k.shape[2:], v.shape[-1]), dtype=wide)


STATE_EXECUTORS: Handles[StateExecutor] = Handles()
