"""Custom operators of context parallelism, each with a forward, a fake and a backward function.

Each is opaque to torch.compile, to recompute policies and to the planner, and this helps all three.
torch.compile cannot trace process groups, and would otherwise break the graph of every layer. A
recompute policy can save the attention by its operator's name, so that its communication does not
run twice. And the planner can replace the operator by its cost.

Operators take no Python objects, so they take handles (``parallel.context.plan``). The function
that calls an operator takes the objects.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import Keys, Rows, sinks_gradient
from parallel.context.executor import EXECUTORS, Executor
from parallel.context.geometry import Geometry
from parallel.context.layout import Window
from parallel.context.linear.delta import DELTA_EXECUTORS, DeltaExecutor
from parallel.context.linear.halo import CONVOLUTIONS, Convolution
from parallel.context.linear.relayout import RELAYOUTS, Relayout
from parallel.context.linear.segments import state_plan
from parallel.context.linear.state import STATE_EXECUTORS, StateExecutor, empty_state
from parallel.context.plan import PLANS, Plan, plan_of
from parallel.context.transport import HEAD_EXCHANGES, HeadExchange
from runtime.tensors import Handles, accum_dtype, differentiable


def prefetch_kv(executor: Executor, k: Tensor, v: Tensor) -> Tensor:
    """Start gathering k and v; return the handle for the next ``context_attention``.

    The handle is a tensor, so that a recompute policy can save it; recomputing would gather again.
    """
    return torch.ops.longmesh.prefetch_kv(k.detach(), v.detach(), executor.handle)


@torch.library.custom_op("longmesh::prefetch_kv", mutates_args=())
def _prefetch_kv(k: Tensor, v: Tensor, handle: int) -> Tensor:
    return torch.tensor(EXECUTORS[handle].prefetch_kv(k, v))


@_prefetch_kv.register_fake
def _(k: Tensor, v: Tensor, handle: int) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def context_attention(
    executor: Executor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    plan: Tensor,
    window: Window | None,
    prefetch: Tensor | None,
) -> Tensor:
    """Compute a rank's softmax attention under the plan of a handle; differentiable, collective.

    Shapes as in ``parallel.context.executor``; ``prefetch`` is the handle from ``prefetch_kv``.
    """
    out, _ = torch.ops.longmesh.context_attention(
        q, k, v, sinks, scale, executor.handle, plan, list(window or ()), prefetch
    )
    return out


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Any,
    scale: float,
    handle: int,
    plan: Tensor,
    window: Any,
    prefetch: Any,
) -> tuple[Tensor, Tensor]:
    executor = EXECUTORS[handle]
    prefetch_handle = None if prefetch is None else int(prefetch)
    windowed = windowed_plan(plan, window, executor)
    return executor.forward(windowed, q, Keys(k, v), sinks, scale, prefetch_handle)


def _attention_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=accum_dtype(q.dtype))


def _attention_backward(dout: Tensor, _: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, scale, handle, plan, window = arguments
    executor = EXECUTORS[handle]
    windowed = windowed_plan(plan, window, executor)
    gradients = executor.backward(windowed, Rows(q, dout, out, lse), Keys(k, v), scale)
    dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
    return *gradients, dsinks


def windowed_plan(handle: Tensor, window: list[int], executor: Executor) -> Plan:
    """Return the plan of a handle, with a window [left, right], or [] for no window."""
    plan = plan_of(handle, executor.geometry)
    return plan.windowed((window[0], window[1])) if window else plan


differentiable(
    "longmesh::context_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? sinks",
    "float scale, int handle, Tensor plan, int[] window",
    _attention_forward,
    _attention_fake,
    _attention_backward,
    unsaved=", Tensor? prefetch",
    saves=[0, 1],
    owner=lambda scale, handle, *_: EXECUTORS[handle],
)


def tokens_to_heads(exchange: HeadExchange, x: Tensor) -> Tensor:
    """Exchange [B, T, H, D] -> [B, U * T, max(1, H / U), D]; differentiable."""
    degree = len(exchange.ranks)
    return x if degree == 1 else torch.ops.longmesh.tokens_to_heads(x, degree, exchange.handle)


def heads_to_tokens(exchange: HeadExchange, x: Tensor) -> Tensor:
    """Exchange [B, U * T, H / U, D] -> [B, T, H, D]; differentiable."""
    degree = len(exchange.ranks)
    if degree == 1:
        return x
    return torch.ops.longmesh.heads_to_tokens(x, x.shape[2] * degree, degree, exchange.handle)


@torch.library.custom_op("longmesh::tokens_to_heads", mutates_args=())
def _tokens_to_heads(x: Tensor, degree: int, handle: int) -> Tensor:
    return HEAD_EXCHANGES[handle].to_heads(x)


@_tokens_to_heads.register_fake
def _(x: Tensor, degree: int, handle: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * degree, max(1, x.shape[2] // degree), x.shape[3])


@torch.library.custom_op("longmesh::heads_to_tokens", mutates_args=())
def _heads_to_tokens(x: Tensor, heads: int, degree: int, handle: int) -> Tensor:
    return HEAD_EXCHANGES[handle].to_tokens(x, heads)


@_heads_to_tokens.register_fake
def _(x: Tensor, heads: int, degree: int, handle: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // degree, heads, x.shape[3])


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *_, ctx.degree, ctx.handle = inputs
    ctx.heads = x.shape[2]
    ctx.exchange = HEAD_EXCHANGES[ctx.handle]  # keep the exchange alive until the backward pass


def _tokens_to_heads_backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
    dinput = torch.ops.longmesh.heads_to_tokens(dx, ctx.heads, ctx.degree, ctx.handle)
    return dinput, None, None


def _heads_to_tokens_backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.longmesh.tokens_to_heads(dx, ctx.degree, ctx.handle), None, None, None


_tokens_to_heads.register_autograd(_tokens_to_heads_backward, setup_context=_save_exchange)
_heads_to_tokens.register_autograd(_heads_to_tokens_backward, setup_context=_save_exchange)


def relayout_in(relayout: Relayout, x: Tensor) -> Tensor:
    """Move x [B, T, ...] from the outer layout to the inner one; differentiable."""
    return torch.ops.longmesh.relayout_in(x, relayout.handle)


def relayout_out(relayout: Relayout, x: Tensor) -> Tensor:
    """Move x [B, T, ...] from the inner layout to the outer one; differentiable."""
    return torch.ops.longmesh.relayout_out(x, relayout.handle)


@torch.library.custom_op("longmesh::relayout_in", mutates_args=())
def _relayout_in(x: Tensor, handle: int) -> Tensor:
    return RELAYOUTS[handle].exchange(x, 0)


@torch.library.custom_op("longmesh::relayout_out", mutates_args=())
def _relayout_out(x: Tensor, handle: int) -> Tensor:
    return RELAYOUTS[handle].exchange(x, 1)


def _save_relayout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.handle = inputs
    ctx.relayout = RELAYOUTS[ctx.handle]  # keep the relayout alive until the backward pass


_relayout_in.register_fake(lambda x, handle: x.new_empty(x.shape))
_relayout_out.register_fake(lambda x, handle: x.new_empty(x.shape))
# The exchange permutes tokens, so its gradient is the opposite exchange.
_relayout_in.register_autograd(
    lambda ctx, dx: (torch.ops.longmesh.relayout_out(dx, ctx.handle), None),
    setup_context=_save_relayout,
)
_relayout_out.register_autograd(
    lambda ctx, dx: (torch.ops.longmesh.relayout_in(dx, ctx.handle), None),
    setup_context=_save_relayout,
)


def rank_operator(
    name: str,
    inputs: str,
    fake: Callable[..., tuple[Tensor, Tensor]],
    executors: Handles[Any],
    plan_from: Callable[[Tensor, Geometry], Plan] = plan_of,
    others: str = "",
) -> None:
    """Register the forward and backward pass of a class of executors as one operator.

    The executors have ``forward(plan, *operands)`` and ``backward(plan, dout, saved, *operands)``.
    The operator takes ``inputs`` and ``others``, then the handles of an executor and of a plan, and
    returns out and another tensor that the backward needs.

    Args:
        name: namespace and name of the operator.
        inputs: types and names of the tensors that have gradients.
        fake: returns tensors like the results.
        executors: the table of executors, keyed by handle.
        plan_from: returns the plan of a handle, checked against the executor's geometry.
        others: types and names of the other operands.
    """
    num_inputs = inputs.count(",") + 1

    # Executors choose their dtypes themselves, so autocast is off inside an operator.
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        *operands, handle, plan = arguments
        executor = executors[handle]
        with torch.autocast(operands[0].device.type, enabled=False):
            checked_plan = plan_from(plan, executor.transport.geometry)
            results: tuple[Tensor, Tensor] = executor.forward(checked_plan, *operands)
        return results

    def backward(dout: Tensor, _: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *operands, handle, plan = arguments
        saved = operands.pop(num_inputs)
        with torch.autocast(dout.device.type, enabled=False):
            gradients: tuple[Tensor, ...] = executors[handle].backward(
                PLANS[plan], dout, saved, *operands
            )
        return gradients

    def owner(*other_arguments: Any) -> object:
        return executors[other_arguments[-2]]

    others += "int handle, Tensor plan"
    differentiable(name, inputs, others, forward, fake, backward, saves=[1], owner=owner)


def state_attention(
    executor: StateExecutor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    plan: Tensor,
) -> Tensor:
    """Compute a rank's linear attention ``[B, T, H, E]``; differentiable, collective."""
    out, _ = torch.ops.longmesh.state_attention(q, k, v, log_decay, executor.handle, plan)
    return out


def _state_fake(
    q: Tensor, k: Tensor, v: Tensor, _: Any, handle: int, __: Tensor
) -> tuple[Tensor, Tensor]:
    state = empty_state(k, v)
    slots = STATE_EXECUTORS[handle].geometry.slots
    return v.new_empty(v.shape), state.new_empty(slots, *state.shape)


rank_operator(
    "longmesh::state_attention",
    "Tensor q, Tensor k, Tensor v",
    _state_fake,
    STATE_EXECUTORS,
    others="float[] log_decay, ",
)


def delta_attention(
    executor: DeltaExecutor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a rank's gated delta rule; differentiable, collective. See ``DeltaExecutor``."""
    return torch.ops.longmesh.delta_attention(q, k, v, g, beta, executor.handle, plan)


def _delta_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    saved_size = torch.library.get_ctx().new_dynamic_size()  # the plan decides the size
    return v.new_empty(v.shape), v.new_empty(saved_size, dtype=accum_dtype(v.dtype))


rank_operator(
    "longmesh::delta_attention",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta",
    _delta_fake,
    DELTA_EXECUTORS,
    partial(state_plan, "attend_delta"),
)


def context_convolution(
    convolution: Convolution, x: Tensor, weight: Tensor, plan: Tensor
) -> Tensor:
    """Compute a rank's causal convolution, ``[B, T, C]``; differentiable, collective."""
    out, _ = torch.ops.longmesh.context_convolution(x, weight, convolution.handle, plan)
    return out


def _convolution_fake(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()  # the plan decides the number
    return x.new_empty(x.shape), x.new_empty(x.shape[0], rows, x.shape[2])


rank_operator(
    "longmesh::context_convolution",
    "Tensor x, Tensor weight",
    _convolution_fake,
    CONVOLUTIONS,
    partial(state_plan, "convolve"),
)
