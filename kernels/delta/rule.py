"""Linear attention by the gated delta rule, forward and backward: Gated DeltaNet and Kimi Delta
Attention.

A token's key k overwrites what the state S [D, E] holds there: it decays S by its gate, then moves
the value at k by the share beta towards its own (Yang, Kautz and Hatamizadeh 2024,
arXiv:2412.06464, equation 10):

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T      o_t = S_t^T q_t

The gate is one number per head, or one per channel of the key (Kimi Linear 2025, arXiv:2510.26692).
Keys have norm 1 or less and queries are scaled before; with beta up to 2 no state grows.

Any tokens are scanned in slabs of chunks: memory and time are linear in the number of tokens. A
slab is computed by ``kernels.delta.chunks`` in torch or by ``kernels.triton.delta`` on a GPU. The
states between slabs are kept, and all else is computed again in the backward.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backends import LINEAR
from kernels.backends.base import SIMULATED_SLAB, Slab
from kernels.delta.chunks import CHUNK
from kernels.linear_attention import check_sequence, select_linear_backend
from runtime.errors import UserError
from runtime.simulation import device_type_of
from runtime.tensors import accum_dtype

CPU_CHUNKS, GPU_CHUNKS = 32, 4096
"""Chunks of all rows in one slab."""


def check(
    inputs: tuple[Tensor, ...], state: Tensor | None = None, documents: Sequence[int] | None = None
) -> None:
    """Raise ValueError for the first argument of ``delta_rule`` that is wrong."""
    q, k, v, g, beta = inputs
    (batch, length, key_heads, width), heads = q.shape, v.shape[2]
    if (
        k.shape != q.shape
        or v.shape[:2] != q.shape[:2]
        or heads % key_heads
        or not q.dtype == k.dtype == v.dtype
    ):
        raise ValueError(
            f"the delta rule takes q and k [B, T, K, D] and v [B, T, H, E] of one dtype, H a multiple of K, and got q "
            f"{tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
        )
    if batch * length == 0:
        raise ValueError(
            f"the delta rule got {batch} sequences of {length} tokens; give at least one of each"
        )
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
    """Return the backend, as ``select_linear_backend``; ``auto`` takes ``chunked`` for what the
    fastest does not take.

    Raises:
        UserError: the backend does not exist, or cannot take these inputs.
    """
    backend = select_linear_backend(name, device_type, dtype)
    refusal = LINEAR[backend].delta_refusal(per_channel=per_channel, key_dim=width)
    if refusal and name != "auto":
        raise UserError(f"attention_backend {name} {refusal}; use auto or chunked")
    return "chunked" if refusal else backend


def gates_with_resets(g: Tensor, documents: Sequence[int] | None) -> Tensor:
    """Return gates that forget everything, -inf, where a document begins after the first."""
    if documents is None or len(documents) == 2:
        return g
    begins = torch.zeros(g.shape[1], dtype=torch.bool)
    begins[list(documents[1:-1])] = True
    begins = begins.to(g.device, non_blocking=True)
    return g.masked_fill(begins.view(-1, *[1] * (g.ndim - 2)), -math.inf)


def kernel_of(backend: str, k: Tensor, g: Tensor) -> Slab:
    """Return a slab's forward and backward, as ``kernels.delta.chunks`` has them."""
    if SIMULATED_SLAB.value is not None:
        return SIMULATED_SLAB.value
    name = select_delta_backend(
        backend, k.device.type, k.dtype, per_channel=g.ndim == 4, width=k.shape[-1]
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
    """Return out ``[B, T, H, E]`` and the states ``[S + 1, B, H, D, E]`` before each slab and after
    the last token.

    Both are in float32 or wider. Arguments as of ``delta_rule``, but that a state may have more
    columns than values have; a gate of -inf forgets all before its token.
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
    """Scan tokens whose incoming state S is not known yet: any state is M S + U, the output out_0 +
    Q S.

    One pass over a state of E + D columns, which begins as [0 | I] and whose last D columns no
    value enters.

    Returns:
        out_0 ``[B, T, H, E]``, Q ``[B, T, H, D]``, and [U | M] of each state that ``scan`` returns,
        ``[S + 1, B, H, D, E + D]``.
    """
    zero, width = _zero_state(k, v), q.shape[-1]
    start = torch.cat(
        (zero, torch.eye(width, dtype=zero.dtype, device=zero.device).expand(*zero.shape[:3], -1)),
        -1,
    )
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
    step = CHUNK * max(1, (CPU_CHUNKS if device_type_of(v) == "cpu" else GPU_CHUNKS) // rows)
    return [slice(first, first + step) for first in range(0, k.shape[1], step)]


def _zero_state(k: Tensor, v: Tensor) -> Tensor:
    wide = accum_dtype(k.dtype)
    return v.new_zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), dtype=wide)
