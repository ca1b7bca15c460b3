"""Operators of executors, which run plans over ranks.

A custom operator takes no Python object, so it takes handles. That of an executor is an integer. That of a plan is a
tensor: the mask may change with every micro-batch, and torch.compile would recompile for each new integer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel.context.errors import ContextError
from parallel.context.geometry import Geometry
from parallel.context.plan import PLANS, Plan
from runtime.tensors import Handles, differentiable


def plan_of(handle: Tensor, geometry: Geometry) -> Plan:
    """Return a plan by its handle.

    Raises ContextError: it is of other ranks, another length, method or layout than ``geometry``.
    """
    plan = PLANS[handle]
    own = plan.geometry
    alone = own.size == geometry.size == 1 and own.padded_len == geometry.padded_len
    if own is not geometry and own != geometry and not alone:
        raise ContextError(
            f"mask is of {own.method.name} over {own.seq_len} tokens on {own.size} ranks, and this attention is "
            f"{geometry.method.name} over {geometry.seq_len} on {geometry.size}; pass a handle from under(...) of "
            "the same object"
        )
    return plan


def rank_operator(
    name: str,
    inputs: str,
    fake: Callable[..., tuple[Tensor, Tensor]],
    checked: Callable[[Tensor, Geometry], Plan] = plan_of,
    others: str = "",
) -> Handles[Any]:
    """Register ``forward(plan, *given)`` and ``backward(plan, dout, kept, *given)`` of executors as one operator.

    It takes what is given, the inputs and others, then the handles of an executor and of a plan, and returns out and
    what the backward needs besides.

    Returns:
        The table for the executors' handles.
    """
    executors: Handles[Any] = Handles()

    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        *operands, handle, plan = given
        executor = executors[handle]
        with torch.autocast(operands[0].device.type, enabled=False):
            found: tuple[Tensor, Tensor] = executor.forward(checked(plan, executor.transport.geometry), *operands)
        return found

    def backward(dout: Tensor, _: Any, *given: Any) -> tuple[Tensor, ...]:
        *inputs, handle, plan = given
        kept = inputs.pop(count)
        with torch.autocast(dout.device.type, enabled=False):
            found: tuple[Tensor, ...] = executors[handle].backward(PLANS[plan], dout, kept, *inputs)
        return found

    count = inputs.count(",") + 1
    others += "int handle, Tensor plan"
    owner = lambda *others: executors[others[-2]]  # noqa: E731
    differentiable(name, inputs, others, forward, fake, backward, saves=[1], owner=owner)
    return executors
