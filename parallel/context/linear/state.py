"""Executor of methods that pass states on. The only autograd code for linear attention over several ranks.

A scan is linear in the incoming state (kernels/linear_attention.py), so a rank computes all but one matrix product
while the state is in transit. The backward reuses that state, so that dq needs no other rank; the state's gradient goes
the other way. States and sums are in float32 (float64 for float64 inputs) and are cast once at the end. No check reads
them, since that would wait for the GPU: an overflow shows in every rank's gradient norm.
Shapes: q, k ``[B, T, H, D]``, v ``[B, T, H, E]`` with T local positions, states ``[B, H, D, E]``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.linear_attention import Scan, backward, from_state, passed_on, scan_of, select_linear_backend
from parallel.context.geometry import Geometry
from parallel.context.linear.passages import Passage, passages
from parallel.context.plan import PLANS, Plan
from parallel.context.transport import Tensors, Transport
from runtime.tensors import Handles

Work = Callable[[], tuple[Tensors, Tensor]]
"""Computation on one rank alone -> its results, and the state after this rank's tokens, from zero."""


@dataclass(eq=False)
class StateExecutor:
    """Linear attention of one rank, for any plan of one geometry that passes states on."""

    geometry: Geometry
    transport: Transport
    rank: int
    backend_name: str

    def __post_init__(self) -> None:
        self.handle = _executors.add(self)

    def forward(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return out ``[B, T, H, E]`` in v's dtype, and the incoming state, zero if there is none."""
        run, ways = self._scan(q), self._ways(plan, reverse=False)
        here = ways[self.rank]

        def intra() -> tuple[Tensors, Tensor]:
            out, local = run(q, k, v, log_decay, None, here.documents, wide=True)
            return (out,), local

        def alone() -> Tensor:
            return run(None, k, v, log_decay, None, here.documents)[1]

        (out,), state, finish = self._pass_states(intra, alone, _state_like(k, v), log_decay, ways, reverse=False)
        if state is None:
            state = torch.zeros_like(_state_like(k, v))
        else:
            out += from_state(q, state, log_decay, here.seen)
        finish()
        return out.to(v.dtype), state

    def backward(
        self, plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv in the dtypes of q, k and v; ``state`` is the one that forward returned."""
        run, ways = self._scan(q), self._ways(plan, reverse=True)
        here = ways[self.rank]
        documents = here.documents
        entered = None if self._ways(plan, reverse=False)[self.rank].source is None else state

        def intra() -> tuple[Tensors, Tensor]:
            *gradients, local = backward(run, dout, None, q, k, v, log_decay, entered, documents, wide=True)
            return tuple(gradients), local

        def alone() -> Tensor:
            return run(None, q, dout, log_decay, None, documents, reverse=True)[1]

        (dq, dk, dv), dstate, finish = self._pass_states(intra, alone, _state_like(k, v), log_decay, ways, reverse=True)
        if dstate is not None:
            dk += from_state(v, dstate.transpose(-1, -2), log_decay, here.seen, reverse=True)
            dv += from_state(k, dstate, log_decay, here.seen, reverse=True)
        finish()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _pass_states(
        self,
        intra: Work,
        alone: Callable[[], Tensor],
        like: Tensor,
        log_decay: Sequence[float],
        ways: tuple[Passage, ...],
        *,
        reverse: bool,
    ) -> tuple[Tensors, Tensor | None, Callable[[], object]]:
        """Run ``intra`` while the state is in transit; return its results, the incoming state if any, and a final wait.

        ``alone`` computes only the state that ``intra`` ends with.
        """
        if self.geometry.method.states == "gather":
            local = alone()
            arrival = self.transport.gather((local[:, None],), tuple(range(self.geometry.size)))
            results, _ = intra()
            (states,) = arrival()  # [B, ranks, H, D, E]
            return results, self._sum_before(states, log_decay, ways, reverse), lambda: None
        here = ways[self.rank]
        self.transport.connect_all(like.device)
        coming, _ = self.transport.isend_irecv([], [] if here.source is None else [(here.source, (like,))], far=False)
        results, local = intra()
        (state,) = coming[0]() if coming else (None,)
        if here.target is None:
            return results, state, lambda: None
        if state is not None and here.goes_through:
            local = local + passed_on(state, log_decay, self.geometry.local_len)
        return results, state, self.transport.isend_irecv([(here.target, (local,))], [], far=False)[1]

    def _sum_before(
        self, states: Tensor, log_decay: Sequence[float], ways: tuple[Passage, ...], reverse: bool
    ) -> Tensor | None:
        """Sum the states [B, ranks, H, D, E] of the ranks before this one into its incoming state."""
        ranks = range(self.geometry.size - 1, self.rank, -1) if reverse else range(self.rank)
        running: Tensor | None = None
        for rank in ranks:
            before = running if ways[rank].source is not None and ways[rank].goes_through else None
            running = states[:, rank]
            if before is not None:
                running = running + passed_on(before, log_decay, self.geometry.local_len)
        return running if ways[self.rank].source is not None else None

    def _ways(self, plan: Plan, *, reverse: bool) -> tuple[Passage, ...]:
        return passages(self.geometry.size, self.geometry.local_len, plan.boundaries, reverse)

    def _scan(self, q: Tensor) -> Scan:
        return scan_of(select_linear_backend(self.backend_name, q.device.type, q.dtype))


def _state_like(k: Tensor, v: Tensor) -> Tensor:
    """Allocate a state, uninitialised."""
    wide = torch.promote_types(k.dtype, torch.float32)
    return k.new_empty((k.shape[0], *k.shape[2:], v.shape[-1]), dtype=wide)


# One op for the whole attention, with handles for executor and plan, as in parallel/context/executor.py.
_executors: Handles[StateExecutor] = Handles()


def _plan(plan: Tensor, handle: int) -> Plan:
    found = PLANS[plan]
    found.check_fits(_executors[handle].geometry)
    return found


@torch.library.custom_op("longmesh::state_attention", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], handle: int, plan: Tensor
) -> tuple[Tensor, Tensor]:
    out, state = _executors[handle].forward(_plan(plan, handle), q, k, v, log_decay)
    return out.contiguous(), state.contiguous()  # as the fake says


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, log_decay: Any, handle: int, plan: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _state_like(k, v)


@torch.library.custom_op("longmesh::state_attention_backward", mutates_args=())
def _backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Sequence[float], handle: int, plan: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _executors[handle].backward(_plan(plan, handle), dout, q, k, v, state, log_decay)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_backward_op.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Any, handle: int, plan: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.log_decay, ctx.handle, ctx.plan = inputs  # the handle keeps the plan alive
    ctx.executor = _executors[ctx.handle]  # keep it alive until the backward
    ctx.save_for_backward(q, k, v, output[1])


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    rest = ctx.log_decay, ctx.handle, ctx.plan
    gradients = torch.ops.longmesh.state_attention_backward(dout, *ctx.saved_tensors, *rest)
    return *gradients, None, None, None


_forward_op.register_autograd(_gradients, setup_context=_save)
