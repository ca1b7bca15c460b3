"""Linear attention by the gated delta rule, forward and backward: Gated DeltaNet and Kimi Delta Attention.

A token's key k overwrites what the state S [D, E] holds there: it decays S by its gate, then moves the value at k by
the share beta towards its own (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, equation 10):

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T      o_t = S_t^T q_t

The gate is one number per head, or one per channel of the key (Kimi Linear 2025, arXiv:2510.26692). Keys have norm 1 or
less and queries are scaled before; with beta up to 2 no state grows.

Any tokens are scanned in slabs of chunks: memory and time are linear in the number of tokens. A slab is computed by
``kernels.delta.chunks`` in torch or by ``kernels.triton.delta`` on a GPU. The states between slabs are kept, and all
else is computed again in the backward.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.delta import chunks
from kernels.delta.chunks import CHUNK
from kernels.linear_attention import check_sequence
from kernels.triton import has_triton, interpreted
from runtime.errors import UserError
from runtime.tensors import accum_dtype, differentiable

DELTA_BACKENDS = ("chunked", "triton", "reference")
CPU_CHUNKS, GPU_CHUNKS = 32, 4096
"""Chunks of all rows in one slab."""
WIDEST = 256
"""Channels of keys that the Triton kernels take."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    documents: Sequence[int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule; differentiable in all tensors.

    Args:
        q: ``[B, T, K, D]``, as k; key head h serves the value heads h n to h n + n - 1.
        v: ``[B, T, H, E]``, H = n K.
        g: log of the gates, <= 0: ``[B, T, H]``, or ``[B, T, H, D]`` with H = K.
        beta: ``[B, T, H]``, from 0 to 2.
        state: state before the first token ``[B, H, D, E]``, default zero; only the first document sees it.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., T); each resets the state.
        backend: as for ``select_delta_backend``.

    Returns:
        out ``[B, T, H, E]`` in v's dtype, and the state after the last token in float32 or wider.

    Raises:
        ValueError: shapes that do not match.
        UserError: the backend does not exist.
    """
    check((q, k, v, g, beta), state, documents)
    name = select_delta_backend(backend, q.device.type, q.dtype, per_channel=g.ndim == 4, width=q.shape[-1])
    if name == "reference":
        return reference.delta_rule(q, k, v, g, beta, state, documents=documents)
    out, states = torch.ops.longmesh.delta_rule(q, k, v, gates_with_resets(g, documents), beta, state, name)
    return out, states[-1]


def check(inputs: tuple[Tensor, ...], state: Tensor | None = None, documents: Sequence[int] | None = None) -> None:
    """Raise ValueError for the first argument of ``delta_rule`` that is wrong."""
    q, k, v, g, beta = inputs
    (batch, length, key_heads, width), heads = q.shape, v.shape[2]
    if k.shape != q.shape or v.shape[:2] != q.shape[:2] or heads % key_heads or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"the delta rule takes q and k [B, T, K, D] and v [B, T, H, E] of one dtype, H a multiple of K, and got q "
            f"{tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
        )
    if batch * length == 0:
        raise ValueError(f"the delta rule got {batch} sequences of {length} tokens; give at least one of each")
    per_head = batch, length, heads
    per_channel = (*per_head, width) if heads == key_heads else per_head
    if g.shape not in (per_head, per_channel) or beta.shape != per_head:
        raise ValueError(
            f"g has shape {tuple(g.shape)} and beta {tuple(beta.shape)}; beta is {per_head}, g that or {per_channel}"
        )
    check_sequence(length, (batch, heads, width, v.shape[-1]), state, documents)


def select_delta_backend(
    name: str,
    device_type: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    per_channel: bool = False,
    width: int = 128,
) -> str:
    """Return the backend; ``auto`` takes the fastest available.

    ``chunked`` is torch on any device, ``reference`` goes token by token. ``triton`` has kernels for a GPU, with gates
    per head and keys of up to 256 channels: ``auto`` takes it there for 16-bit inputs that are so, and ``chunked`` for
    gates per channel, wider keys and float32, whose products by TF32 are slower than torch's.

    Raises:
        UserError: the backend does not exist, or cannot take these inputs.
    """
    if name == "auto":
        fits = dtype in (torch.bfloat16, torch.float16) and not per_channel and width <= WIDEST
        return "triton" if device_type == "cuda" and fits and has_triton() else "chunked"
    if name not in DELTA_BACKENDS:
        raise UserError(
            f"attention_backend is {name!r}, which has no delta rule; use auto, {', '.join(DELTA_BACKENDS)}"
        )
    if name == "triton":
        problems = {
            "is not installed": not has_triton(),
            f"needs a cuda device and this one is {device_type}": device_type != "cuda" and not interpreted(),
            f"takes no {dtype} in the delta rule": dtype not in (torch.bfloat16, torch.float16, torch.float32),
            "takes gates per head in the delta rule, and these are per channel": per_channel,
            f"takes keys of up to {WIDEST} channels in the delta rule, and these have {width}": width > WIDEST,
        }
        for problem in (text for text, found in problems.items() if found):
            raise UserError(f"attention_backend triton {problem}; use auto or chunked")
    return name


def gates_with_resets(g: Tensor, documents: Sequence[int] | None) -> Tensor:
    """Return gates that forget everything, -inf, where a document begins after the first."""
    if documents is None or len(documents) == 2:
        return g
    begins = torch.zeros(g.shape[1], dtype=torch.bool)
    begins[list(documents[1:-1])] = True
    begins = begins.to(g.device, non_blocking=True)
    return g.masked_fill(begins.view(-1, *[1] * (g.ndim - 2)), -math.inf)


def kernel_of(backend: str, k: Tensor, g: Tensor) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """Return a slab's forward and backward, as ``kernels.delta.chunks`` has them; ``reference`` takes these."""
    asked = "chunked" if backend == "reference" else backend
    name = select_delta_backend(asked, k.device.type, k.dtype, per_channel=g.ndim == 4, width=k.shape[-1])
    if name == "triton":
        from kernels.triton import delta, delta_backward

        return delta.forward, delta_backward.backward
    return chunks.forward, chunks.backward


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return out ``[B, T, H, E]`` and the states ``[S + 1, B, H, D, E]`` before each slab and after the last token.

    Both are in float32 or wider. Arguments as of ``delta_rule``, but that a state may have more columns than values
    have; a gate of -inf forgets all before its token.
    """
    state = _zero_state(k, v) if state is None else state
    slabs, (run, _) = _slabs(k, v), kernel_of(backend, k, g)
    states = state.new_empty(len(slabs) + 1, *state.shape)
    states[0] = state
    out = state.new_empty(*v.shape[:3], state.shape[-1])
    for n, slab in enumerate(slabs):
        run(tuple(x[:, slab] for x in (q, k, v, g, beta)), states[n], out[:, slab], states[n + 1])
    return out, states


def wide_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan tokens whose incoming state S is not known yet: any state is M S + U, the output out_0 + Q S.

    One pass over a state of E + D columns, which begins as [0 | I] and whose last D columns no value enters.

    Returns:
        out_0 ``[B, T, H, E]``, Q ``[B, T, H, D]``, and [U | M] of each state that ``scan`` returns,
        ``[S + 1, B, H, D, E + D]``.
    """
    zero, width = _zero_state(k, v), q.shape[-1]
    start = torch.cat((zero, torch.eye(width, dtype=zero.dtype, device=zero.device).expand(*zero.shape[:3], -1)), -1)
    out, states = scan(q, k, v, g, beta, start, backend=backend)
    return out[..., : v.shape[-1]], out[..., v.shape[-1] :], states


def backward(
    inputs: tuple[Tensor, ...], states: Tensor, dout: Tensor, dfinal: Tensor | None, *, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv, dg, dbeta and dstate, float32 or wider.

    Args:
        inputs: q, k, v, g and beta.
        states: as ``scan`` returned them; everything else is computed again.
        dfinal: gradient of the state after the last token, None for 0.
    """
    _, k, v, g, _ = inputs
    _, run = kernel_of(backend, k, g)
    found = [torch.empty(x.shape, dtype=states.dtype, device=x.device) for x in inputs]
    leaving = torch.zeros_like(states[0]) if dfinal is None else dfinal
    for slab, state in reversed(list(zip(_slabs(k, v), states[:-1], strict=True))):
        here, gradients = (tuple(x[:, slab] for x in group) for group in (inputs, found))
        leaving = run(here, dout[:, slab], leaving, state, gradients)
    return *found, leaving


def empty_states(k: Tensor, v: Tensor) -> Tensor:
    """Allocate the states that ``scan`` returns, uninitialised."""
    zero = _zero_state(k, v)
    return zero.new_empty(len(_slabs(k, v)) + 1, *zero.shape)


def _slabs(k: Tensor, v: Tensor) -> list[slice]:
    """Cut the tokens into slabs of whole chunks, whose temporaries a processor's cache holds."""
    rows = v.shape[0] * v.shape[2]
    step = CHUNK * max(1, (CPU_CHUNKS if v.device.type == "cpu" else GPU_CHUNKS) // rows)
    return [slice(first, first + step) for first in range(0, k.shape[1], step)]


def _zero_state(k: Tensor, v: Tensor) -> Tensor:
    wide = accum_dtype(k.dtype)
    return v.new_zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), dtype=wide)


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    *inputs, backend = given
    with torch.autocast(inputs[0].device.type, enabled=False):
        out, states = scan(*inputs, backend=backend)
    return out.to(inputs[2].dtype), states


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), empty_states(k, v)


def _backward(dout: Tensor, dstates: Tensor | None, *given: Any) -> list[Tensor]:
    *inputs, _, states, backend = given
    dfinal = None if dstates is None else dstates[-1]
    with torch.autocast(dout.device.type, enabled=False):
        *found, dstate = backward(tuple(inputs), states, dout, dfinal, backend=backend)
    return [*found, dstate.clone()]  # not all states' memory


differentiable(
    "longmesh::delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state",
    "str backend",
    *(_forward, _fake, _backward),
    saves=[1],
)
