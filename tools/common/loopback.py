"""Run one rank of a plan without its peers, to time its work without communication."""

from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor

from kernels.blocks import Keys, Rows
from parallel.context import Plan
from parallel.context.executor import Executor
from parallel.context.methods.base import Send
from parallel.context.transport import Arrival, Tensors, Transport


class LoopbackTransport(Transport):
    """A transport without peers: every exchange returns the tensors that the rank itself sent."""

    def _new_group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
        return None

    def isend_irecv(
        self, sends: list[tuple[int, Tensors]], receives: list[tuple[int, Tensors]], far: bool
    ) -> tuple[list[Arrival], Callable[[], object]]:
        arrivals: list[Arrival] = []
        for _, tensors in receives:
            arrivals.append(lambda tensors=tensors: tensors)  # type: ignore[misc]
        return arrivals, lambda: None

    def send_recv(self, tensors: Tensors, send: Send, far: bool) -> Arrival:
        return lambda: tensors

    def gather(self, tensors: Tensors, ranks: tuple[int, ...], *, by_rank: bool = False) -> Arrival:
        return lambda: tuple(torch.cat([tensor] * len(ranks), dim=1) for tensor in tensors)

    def exchange(self, parts: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return parts.contiguous()


def step_of(
    plan: Plan, executor: Executor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Callable[[], None]:
    """Return a function that runs one rank's attention, forward and backward, under a plan."""
    scale = q.shape[-1] ** -0.5

    def step() -> None:
        out, lse = executor.forward(plan, q, Keys(k, v), None, scale)
        executor.backward(plan, Rows(q, dout, out, lse), Keys(k, v), scale)

    return step
