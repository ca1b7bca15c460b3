"""Gated delta rule over any number of tokens: Gated DeltaNet and Kimi Delta Attention.

A token's key k overwrites the value that the state S [D, E] holds at that key: the gate decays S,
then the value at k moves by the share beta towards the token's value (Yang, Kautz and Hatamizadeh
2024, arXiv:2412.06464, equation 10):

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T      o_t = S_t^T q_t

The gate is one number per head, or one per channel of the key (Kimi Linear 2025, arXiv:2510.26692).
The caller scales the queries and gives keys of norm 1 or less; with beta up to 2, no state grows.

The tokens are scanned in slabs (ranges of chunks): memory and time are linear in the number of
tokens. A slab is computed by ``kernels.delta.chunks`` in torch or by ``kernels.triton.delta`` on a
GPU. The states between slabs are saved; the backward pass recomputes everything else.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backends import LINEAR
from kernels.backends.base import SIMULATED_SLAB, SlabKernel
from kernels.delta.chunks import CHUNK
from kernels.linear_attention import check_sequence, select_linear_backend
from runtime.errors import UserError
from runtime.simulation import device_type_of
from runtime.tensors import accum_dtype

CPU_CHUNKS = 32
"""Number of chunks in one slab on a CPU, summed over sequences and heads."""
GPU_CHUNKS = 4096
"""Number of chunks in one slab on a GPU, summed over sequences and heads."""


def check(
    inputs: tuple[Tensor, ...], state: Tensor | None = None, cu_seqlens: Sequence[int] | None = None
) -> None:
    """Raise ValueError for the first argument of ``delta_rule`` that is wrong."""
    q, k, v, g, beta = inputs
    batch, length, key_heads, width = q.shape
    heads = v.shape[2]
    if (
        k.shape != q.shape
        or v.shape[:2] != q.shape[:2]
        or heads % key_heads
        or not q.dtype == k.dtype == v.dtype
    ):
        raise ValueError(
            "the delta rule takes q and k [B, T, K, D] and v [B, T, H, E] of one dtype, H a"
            f" multiple of K, but got q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}"
            f" and v {tuple(v.shape)} {v.dtype}"
        )
    if batch * length == 0:
        raise ValueError(
            f"the delta rule got {batch} sequences of {length} tokens; give at least one of each"
        )

    per_head = (batch, length, heads)
    per_channel = (*per_head, width) if heads == key_heads else per_head
    if g.shape not in (per_head, per_channel) or beta.shape != per_head:
        raise ValueError(
            f"g has shape {tuple(g.shape)} and beta {tuple(beta.shape)}; beta must be {per_head},"
            f" and g {per_head} or {per_channel}"
        )
    check_sequence(length, (batch, heads, width, v.shape[-1]), state, cu_seqlens)


def select_delta_backend(
    name: str,
    device_type: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    per_channel: bool = False,
    width: int = 128,
) -> str:
    """Return the backend of the delta rule for this device and dtype.

    ``auto`` takes the fastest backend of linear attention, or ``chunked`` if that does not support
    these gates or keys.

    Raises:
        UserError: the backend does not exist, or cannot take these inputs.
    """
    backend = select_linear_backend(name, device_type, dtype)
    refusal = LINEAR[backend].delta_refusal(per_channel=per_channel, key_dim=width)
    if refusal and name != "auto":
        raise UserError(f"attention_backend {name} {refusal}; use auto or chunked")
    return "chunked" if refusal else backend


def gates_with_resets(g: Tensor, cu_seqlens: Sequence[int] | None) -> Tensor:
    """Return gates with -inf at each document start after the first, which resets the state."""
    if cu_seqlens is None or len(cu_seqlens) == 2:
        return g
    resets = torch.zeros(g.shape[1], dtype=torch.bool)  # [T]
    resets[list(cu_seqlens[1:-1])] = True
    resets = resets.to(g.device, non_blocking=True)
    return g.masked_fill(resets.view(-1, *[1] * (g.ndim - 2)), -math.inf)


def slab_kernel(backend: str, k: Tensor, g: Tensor) -> SlabKernel:
    """Return the functions that run a slab forward and backward, as in ``kernels.delta.chunks``."""
    if SIMULATED_SLAB.value is not None:
        return SIMULATED_SLAB.value
    per_channel = g.ndim == 4
    name = select_delta_backend(
        backend, k.device.type, k.dtype, per_channel=per_channel, width=k.shape[-1]
    )
    return LINEAR[name].delta_slab()


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Scan the tokens, and save the states between slabs.

    Arguments are those of ``kernels.ops.delta_rule``, with two differences: a state may have more
    columns than the values have channels, and a gate of -inf forgets everything before its token.

    Returns:
        out ``[B, T, H, E]``, and the states ``[S + 1, B, H, D, E]`` before each of S slabs and
        after the last token; both in float32 or wider.
    """
    if state is None:
        state = _zero_state(k, v)
    slabs = _slabs(k, v)
    forward, _ = slab_kernel(backend, k, g)
    states = state.new_empty(len(slabs) + 1, *state.shape)
    states[0] = state
    out = state.new_empty(*v.shape[:3], state.shape[-1])
    for n, slab in enumerate(slabs):
        slab_inputs = (q[:, slab], k[:, slab], v[:, slab], g[:, slab], beta[:, slab])
        forward(slab_inputs, states[n], out[:, slab], states[n + 1])
    return out, states


def wide_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan tokens before their incoming state S is known.

    Every later state is a linear function M S + U of it, and the output is out_0 + Q S. One pass
    computes all four: the state has E + D columns and starts as [0 | I], and no value enters the
    last D columns. So a rank can scan its part of a sequence while earlier ranks still work, and
    insert S when it arrives.

    Returns:
        out_0 ``[B, T, H, E]``, Q ``[B, T, H, D]``, and [U | M] of each state that ``scan`` returns,
        ``[S + 1, B, H, D, E + D]``.
    """
    zero = _zero_state(k, v)
    identity = torch.eye(q.shape[-1], dtype=zero.dtype, device=zero.device)
    start = torch.cat((zero, identity.expand(*zero.shape[:3], -1)), -1)  # [B, H, D, E + D]
    out, states = scan(q, k, v, g, beta, start, backend=backend)
    return out[..., : v.shape[-1]], out[..., v.shape[-1] :], states


def backward(
    inputs: tuple[Tensor, ...],
    states: Tensor,
    dout: Tensor,
    dfinal: Tensor | None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Compute dq, dk, dv, dg, dbeta and dstate, float32 or wider.

    Args:
        inputs: q, k, v, g and beta.
        states: as ``scan`` returned them; everything else is recomputed.
        dfinal: gradient of the state after the last token, None for 0.
    """
    _, k, v, g, _ = inputs
    _, slab_backward = slab_kernel(backend, k, g)
    gradients = [torch.empty(x.shape, dtype=states.dtype, device=x.device) for x in inputs]
    if dfinal is None:
        dstate = torch.zeros_like(states[0])
    else:
        dstate = dfinal
    slabs = _slabs(k, v)
    for n in reversed(range(len(slabs))):
        slab_inputs = tuple(x[:, slabs[n]] for x in inputs)
        slab_gradients = tuple(dx[:, slabs[n]] for dx in gradients)
        dstate = slab_backward(slab_inputs, dout[:, slabs[n]], dstate, states[n], slab_gradients)
    return *gradients, dstate


def empty_states(k: Tensor, v: Tensor) -> Tensor:
    """Allocate uninitialised tensors for the states that ``scan`` returns."""
    zero = _zero_state(k, v)
    return zero.new_empty(len(_slabs(k, v)) + 1, *zero.shape)


def _slabs(k: Tensor, v: Tensor) -> list[slice]:
    """Split the tokens into slabs of whole chunks, so that temporaries take little memory."""
    heads = v.shape[0] * v.shape[2]  # number of heads over all sequences
    chunks = CPU_CHUNKS if device_type_of(v) == "cpu" else GPU_CHUNKS
    step = CHUNK * max(1, chunks // heads)
    return [slice(first, first + step) for first in range(0, k.shape[1], step)]


def _zero_state(k: Tensor, v: Tensor) -> Tensor:
    shape = (v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])  # [B, H, D, E]
    return v.new_zeros(shape, dtype=accum_dtype(k.dtype))
