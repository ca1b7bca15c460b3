"""Executor of methods that pass states on: linear attention over several ranks.

A scan is linear in the incoming state (kernels/linear_attention.py), so a rank computes everything
but one matmul while the state is in transit. The backward pass reuses the state that came in, so dq
needs no other rank; the state's gradient travels in the other direction. States and sums are in
float32 (float64 for float64 inputs) and are cast once at the end. States are not checked, since the
check would have to wait for the GPU; an overflow shows in every rank's gradient norm instead.

A rank's tokens are one or several stretches of consecutive tokens (``Passage``), numbered by slots.
Shapes: q, k ``[B, T, H, D]``, v ``[B, T, H, E]`` with T local positions, states ``[B, H, D, E]``,
or ``[slots, ...]``.
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

BySlot = dict[int, Tensor]
"""A tensor for each stretch of a rank, keyed by the stretch's slot."""


@dataclass(eq=False)
class StateExecutor:
    """Linear attention of one rank, for any plan of one geometry that passes states on."""

    transport: Transport
    backend_name: str

    def __post_init__(self) -> None:
        self.handle = STATE_EXECUTORS.add(self)
        self.geometry = self.transport.geometry
        self.rank = self.transport.rank

    def forward(
        self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, E]`` in v's dtype, and the state that enters each stretch.

        The state is zero for a stretch without an incoming state.
        """
        scan = self._scan(q)
        outs: BySlot = {}  # [B, T of the stretch, H, E]

        def intra(way: Passage) -> Tensor:
            outs[way.slot], state = scan(
                way.of(q), way.of(k), way.of(v), log_decay, None, way.cu_seqlens, accum_out=True
            )
            return state

        def alone(way: Passage) -> Tensor:
            """Compute only the state after a stretch, without outputs."""
            _, state = scan(None, way.of(k), way.of(v), log_decay, None, way.cu_seqlens)
            return state

        def enter(way: Passage, state: Tensor) -> None:
            """Add the contribution of the incoming state to the tokens of its document."""
            outs[way.slot] += from_state(way.of(q), state, log_decay, way.num_readers)

        like = empty_state(k, v)
        states = self._pass_states(plan, like, log_decay, intra, alone, enter)

        all_states = like.new_zeros(len(outs), *like.shape)  # [slots, B, H, D, E]
        for slot, state in states.items():
            all_states[slot] = state
        return _joined(outs).to(v.dtype), all_states

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
        """Return dq, dk and dv in float32 or wider, given the ``states`` that forward returned."""
        scan = self._scan(q)
        dq: BySlot = {}
        dk: BySlot = {}
        dv: BySlot = {}

        has_state = set()
        for way in self._ways(plan):
            if way.rank == self.rank and way.source is not None:
                has_state.add(way.slot)

        def intra(way: Passage) -> Tensor:
            state = states[way.slot] if way.slot in has_state else None
            dq[way.slot], dk[way.slot], dv[way.slot], dstate = backward(
                scan,
                way.of(dout),
                None,
                way.of(q),
                way.of(k),
                way.of(v),
                log_decay,
                state,
                way.cu_seqlens,
                accum_out=True,
            )
            return dstate

        def alone(way: Passage) -> Tensor:
            _, dstate = scan(
                None, way.of(q), way.of(dout), log_decay, None, way.cu_seqlens, reverse=True
            )
            return dstate

        def enter(way: Passage, dstate: Tensor) -> None:
            readers = way.num_readers
            dstate_t = dstate.transpose(-1, -2)
            dk[way.slot] += from_state(way.of(v), dstate_t, log_decay, readers, reverse=True)
            dv[way.slot] += from_state(way.of(k), dstate, log_decay, readers, reverse=True)

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
    ) -> BySlot:
        """Compute this rank's stretches while the first state is in transit.

        Every stretch is computed as if no state came in, and corrected when the state S arrives:
        out += Q S for the tokens that see it. So a rank waits only for one matmul of the rank
        before it, not for that rank's scan.

        Args:
            plan: the plan, for its documents.
            like: a tensor with a state's shape and dtype.
            log_decay: log of each head's decay.
            intra: computes a stretch without its incoming state, and returns the state after it,
                from zero.
            alone: computes only the state after a stretch, without the stretch's outputs.
            enter: adds the contribution of an incoming state.
            reverse: pass the gradients of states, in the other direction.

        Returns:
            the incoming states, keyed by slot.
        """
        ways = self._ways(plan, reverse=reverse)
        local_ways = [way for way in ways if way.rank == self.rank]
        if self.geometry.method.states == "gather":
            return self._gather_states(ways, local_ways, log_decay, intra, alone, enter)

        self.transport.connect_all(like.device)
        arrival = self._receive(local_ways[0], like)
        local_states = {way.slot: intra(way) for way in local_ways}
        states: BySlot = {}
        waits = []
        handed = like  # the state that leaves the previous stretch

        for way, next_way in zip_longest(local_ways, local_ways[1:]):
            if way.source == self.rank:
                states[way.slot] = handed
            elif way.source is not None:
                (states[way.slot],) = arrival()

            # Send the state on first, since the next rank waits for it.
            handed = local_states.pop(way.slot)
            if way.target is not None and way.slot in states and way.goes_through:
                handed = handed + decayed_state(states[way.slot], log_decay, way.length)
            if way.target not in (None, self.rank):
                _, sent = self.transport.isend_irecv([(way.target, (handed,))], [], far=False)
                waits.append(sent)

            arrival = self._receive(next_way, like)
            if way.slot in states:
                enter(way, states[way.slot])
        for sent in waits:
            sent()
        return states

    def _gather_states(
        self,
        ways: tuple[Passage, ...],
        local_ways: list[Passage],
        log_decay: Sequence[float],
        intra: Callable[[Passage], Tensor],
        alone: Callable[[Passage], Tensor],
        enter: Callable[[Passage, Tensor], None],
    ) -> BySlot:
        """All-gather the states of all stretches; sum those before each stretch of this rank.

        Each rank first computes its states alone, so that the gather overlaps the scans that
        compute outputs.
        """
        by_slot = sorted(local_ways, key=lambda way: way.slot)
        local_states = torch.stack([alone(way) for way in by_slot], 1)  # [B, slots, H, D, E]
        everyone = tuple(range(self.geometry.size))
        arrival = self.transport.gather((local_states,), everyone, by_rank=True)
        for way in local_ways:
            intra(way)
        (all_states,) = arrival()
        states = self._sum_before(all_states, log_decay, ways)
        for way in local_ways:
            if way.slot in states:
                enter(way, states[way.slot])
        return states

    def _receive(self, way: Passage | None, like: Tensor) -> Arrival:
        """Start to receive the state of a stretch, unless this rank has it or no state enters.

        Only one receive is in transit: a second one could depend on a state that this rank has yet
        to send, and a GPU's queue keeps the order of transfers.
        """
        if way is None or way.source in (None, self.rank):
            return lambda: ()
        buffer = torch.empty_like(like)
        (arrival,), _ = self.transport.isend_irecv([], [(way.source, (buffer,))], far=False)
        return arrival

    def _sum_before(
        self, states: Tensor, log_decay: Sequence[float], ways: tuple[Passage, ...]
    ) -> BySlot:
        """Sum the states ``[B, ranks * slots, H, D, E]`` that precede each stretch of this rank.

        They are added in the order of the sequence, each decayed by the tokens after it, as in a
        chain of ranks, so lasp and lasp2 add in the same order.
        """
        slots = self.geometry.slots
        sums: BySlot = {}
        last = [way for way in ways if way.rank == self.rank][-1]
        running = states[:, 0]
        for way in ways:
            incoming = running if way.source is not None else None
            if incoming is not None and way.rank == self.rank:
                sums[way.slot] = incoming
            if way is last:
                break

            running = states[:, way.rank * slots + way.slot]
            if incoming is not None and way.goes_through:
                running = running + decayed_state(incoming, log_decay, way.length)
        return sums

    def _ways(self, plan: Plan, *, reverse: bool = False) -> tuple[Passage, ...]:
        return passages(self.geometry.layout, plan.boundaries, reverse)

    def _scan(self, q: Tensor) -> Scan:
        return scan_of(select_linear_backend(self.backend_name, q.device.type, q.dtype))


def _joined(stretches: BySlot) -> Tensor:
    """Concatenate the tensors of a rank's stretches ``[B, T, ...]``, in the order of slots."""
    if len(stretches) == 1:
        return stretches[0]
    return torch.cat([stretches[slot] for slot in range(len(stretches))], 1)


def empty_state(k: Tensor, v: Tensor) -> Tensor:
    """Allocate an uninitialised state."""
    shape = (k.shape[0], *k.shape[2:], v.shape[-1])  # [B, H, D, E]
    return k.new_empty(shape, dtype=accum_dtype(k.dtype))


STATE_EXECUTORS: Handles[StateExecutor] = Handles()
