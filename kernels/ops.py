"""Custom operators of linear attention, the delta rule and its convolution.

The file has, for each operator in turn, its Python function, its forward pass, a fake for shapes
only, and its backward pass. torch.compile and recompute policies see it as one operator. Operators
for matmuls are in ``kernels.operators``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_attention as linear
from kernels import reference
from kernels.delta import convolution, rule
from kernels.linear_attention import scan_of, select_linear_backend
from runtime.tensors import accum_dtype, differentiable


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute causal linear attention; differentiable in q, k, v and state.

    ``kernels.linear_attention`` has the definition.

    Args:
        q, k: ``[B, T, H, D]``.
        v: ``[B, T, H, E]``.
        log_decay: log of each head's decay, H numbers <= 0.
        state: state before the first token ``[B, H, D, E]``, default zero; only tokens of the first
            document see it.
        cu_seqlens: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., T); each resets
            the state.
        backend: as for ``kernels.linear_attention.select_linear_backend``.

    Returns:
        out ``[B, T, H, E]`` in v's dtype, and the state after the last token (of the last
        document), in float32 or wider.

    Raises:
        ValueError: a decay outside (0, 1], or shapes that do not match.
    """
    log_decay = tuple(log_decay)
    linear.check(q, k, v, log_decay, state, cu_seqlens)
    name = select_linear_backend(backend, q.device.type, q.dtype)
    if name == "reference":
        return reference.linear_attention(q, k, v, log_decay, state, cu_seqlens=cu_seqlens)
    return torch.ops.longmesh.linear_attention(q, k, v, state, log_decay, cu_seqlens, name)


def _linear_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    log_decay: Any,
    cu_seqlens: Any,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out, final = scan_of(backend)(q, k, v, log_decay, state, cu_seqlens)
    return out.to(v.dtype), final


def _linear_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    state_shape = (k.shape[0], *k.shape[2:], v.shape[-1])  # [B, H, D, E]
    return v.new_empty(v.shape), k.new_empty(state_shape, dtype=accum_dtype(q.dtype))


def _linear_backward(
    dout: Tensor,
    dfinal: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Any,
    log_decay: Any,
    cu_seqlens: Any,
    backend: str,
) -> tuple[Tensor, ...]:
    return linear.backward(scan_of(backend), dout, dfinal, q, k, v, log_decay, state, cu_seqlens)


differentiable(
    "longmesh::linear_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? state",
    "float[] log_decay, int[]? cu_seqlens, str backend",
    *(_linear_forward, _linear_fake, _linear_backward),
)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule of ``kernels.delta.rule``; differentiable in all tensors.

    Args:
        q: ``[B, T, K, D]``, as k; key head h serves the value heads h n to h n + n - 1.
        v: ``[B, T, H, E]``, H = n K.
        g: log of the gates, <= 0: ``[B, T, H]``, or ``[B, T, H, D]`` with H = K.
        beta: ``[B, T, H]``, from 0 to 2.
        state: state before the first token ``[B, H, D, E]``, default zero; only the first document
            sees it.
        cu_seqlens: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., T); each resets
            the state.
        backend: as for ``kernels.delta.rule.select_delta_backend``.

    Returns:
        out ``[B, T, H, E]`` in v's dtype, and the state after the last token in float32 or wider.

    Raises:
        ValueError: shapes that do not match.
        UserError: the backend does not exist.
    """
    rule.check((q, k, v, g, beta), state, cu_seqlens)
    per_channel = g.ndim == 4
    name = rule.select_delta_backend(
        backend, q.device.type, q.dtype, per_channel=per_channel, width=q.shape[-1]
    )
    if name == "reference":
        return reference.delta_rule(q, k, v, g, beta, state, cu_seqlens=cu_seqlens)
    g = rule.gates_with_resets(g, cu_seqlens)
    out, states = torch.ops.longmesh.delta_rule(q, k, v, g, beta, state, name)
    return out, states[-1]


def _delta_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *inputs, backend = arguments  # q, k, v, g, beta, state
    v = inputs[2]
    with torch.autocast(v.device.type, enabled=False):
        out, states = rule.scan(*inputs, backend=backend)
    return out.to(v.dtype), states


def _delta_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), rule.empty_states(k, v)


def _delta_backward(dout: Tensor, dstates: Tensor | None, *arguments: Any) -> list[Tensor]:
    *inputs, _, states, backend = arguments
    dfinal = None if dstates is None else dstates[-1]
    with torch.autocast(dout.device.type, enabled=False):
        *gradients, dstate = rule.backward(tuple(inputs), states, dout, dfinal, backend=backend)
    # A copy, since a view would keep the memory of all states.
    return [*gradients, dstate.clone()]


differentiable(
    "longmesh::delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state",
    "str backend",
    *(_delta_forward, _delta_fake, _delta_backward),
    saves=[1],
)


def causal_convolution(
    x: Tensor, weight: Tensor, before: Tensor | None = None, cu_seqlens: Sequence[int] | None = None
) -> Tensor:
    """Convolve each channel with its last K tokens; differentiable in all tensors.

    out[t, c] = sum over i < K of weight[c, K - 1 - i] x[t - i, c], summed in float32 or wider.
    There is no bias and no activation.

    Args:
        x: ``[B, T, C]``.
        weight: ``[C, K]``; the last entry of each row is for the token itself.
        before: the K - 1 tokens before the first, ``[B, K - 1, C]``, default zeros; only the first
            document sees them.
        cu_seqlens: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., T); no document
            sees another.

    Returns:
        ``[B, T, C]`` in x's dtype.

    Raises:
        ValueError: shapes that do not match.
    """
    convolution.check(x, weight)
    batch, length, channels = x.shape
    gap = weight.shape[1] - 1
    if before is not None and before.shape != (batch, gap, channels):
        raise ValueError(
            f"before has shape {tuple(before.shape)}; with this x and weight it must be "
            f"{(batch, gap, channels)}"
        )
    linear.check_sequence(length, (), None, cu_seqlens)

    if cu_seqlens is None or len(cu_seqlens) == 2:
        if before is None:
            rows = F.pad(x, (0, 0, gap, 0))  # [B, K - 1 + T, C]
        else:
            rows = torch.cat((before.to(x.dtype), x), 1)
        return convolve(rows, weight)

    rows, index = convolution.spaced(x, cu_seqlens, gap)
    if before is not None:
        rows = torch.cat((before.to(x.dtype), rows[:, gap:]), 1)
    return convolve(rows, weight).index_select(1, index)


def convolve(rows: Tensor, weight: Tensor) -> Tensor:
    """Convolve rows ``[B, K - 1 + N, C]`` with weight ``[C, K]``: ``[B, N, C]``, differentiable."""
    return torch.ops.longmesh.causal_convolution(rows, weight)


@torch.library.custom_op("longmesh::causal_convolution", mutates_args=())
def _convolve(rows: Tensor, weight: Tensor) -> Tensor:
    return convolution.forward(rows, weight)


@_convolve.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(convolution.out_shape(rows, weight))


def convolve_backward(dout: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weight through ``convolve``."""
    return torch.ops.longmesh.causal_convolution_backward(dout, rows, weight)


@torch.library.custom_op("longmesh::causal_convolution_backward", mutates_args=())
def _convolve_backward(dout: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    gap = weight.shape[1] - 1
    drows = convolve(F.pad(dout, (0, 0, gap, gap)), weight.flip(1))
    return drows, convolution.weight_gradient(dout, rows, weight)


@_convolve_backward.register_fake
def _(dout: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _convolve_autograd(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    return convolve_backward(dout, *ctx.saved_tensors)


_convolve.register_autograd(_convolve_autograd, setup_context=_save)
