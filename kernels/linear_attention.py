"""Linear attention with decay, forward and backward, and the parts that context parallelism needs.

With decay a (0 < a <= 1, one per head) the state S_t = a S_(t-1) + k_t v_t^T gives o_t = S_t^T q_t,
which is the sum over s <= t of a^(t-s) (q_t . k_s) v_s (LASP, Sun et al. 2024, section 2;
TransNormerLLM, Qin et al. 2023). Factors are exponentials of (distance * log a), never quotients,
so none overflows.

Everything is one scan over the tokens (``kernels.linear_scan``); the gradients are scans of other
tensors, two of them backwards in time. With G the gradient of the outgoing state:

    out = scan(q, k, v, S)                dq = scan(dout, v, k, S^T)
    dv = scan_back(k, q, dout, G)         dk = scan_back(v, dout, q, G^T)

The result is linear in the incoming state, so a rank that holds part of a sequence computes all but
``from_state`` before the state of earlier ranks arrives.

Shapes: q, k ``[B, T, H, D]``, v ``[B, T, H, E]``, states ``[B, H, D, E]`` in float32 or wider; N
chunks of C tokens.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from kernels.backends import BACKENDS, LINEAR
from kernels.backends.base import Scan
from runtime.errors import UserError
from runtime.tensors import accum_dtype, constants


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: tuple[float, ...],
    state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> None:
    """Raise ValueError for the first argument of ``linear_attention`` that is wrong."""
    batch, length, heads, width = q.shape
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "linear attention takes q and k [B, T, H, D] and v [B, T, H, E] of one dtype, but got"
            f" q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype} and"
            f" v {tuple(v.shape)} {v.dtype}"
        )
    if length == 0:
        raise ValueError("linear attention got no tokens; give at least one")
    if len(log_decay) != heads:
        raise ValueError(
            f"log_decay has {len(log_decay)} numbers for {heads} heads; give one per head"
        )
    for head, rate in enumerate(log_decay):
        if not (math.isfinite(rate) and rate <= 0):
            decay = math.inf if rate > 700 else math.exp(rate)
            raise ValueError(
                f"the decay of head {head} is {decay} (its logarithm {rate}); a decay must be above"
                " 0 and at most 1"
            )
    check_sequence(length, (batch, heads, width, v.shape[-1]), state, cu_seqlens)


def check_sequence(
    length: int, shape: tuple[int, ...], state: Tensor | None, cu_seqlens: Sequence[int] | None
) -> None:
    """Raise ValueError for a state of the wrong shape, or documents that do not cover the tokens.

    Args:
        length: number of tokens, T.
        shape: shape that a state must have.
        cu_seqlens: cumulative lengths, rising from 0 to T.
    """
    if state is not None and state.shape != shape:
        raise ValueError(f"the state has shape {tuple(state.shape)}; these q, k and v need {shape}")
    if cu_seqlens is not None:
        rising = all(first < second for first, second in pairwise(cu_seqlens))
        if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != length or not rising:
            raise ValueError(
                f"cu_seqlens is {tuple(cu_seqlens)}; give cumulative lengths, rising from 0 to"
                f" the number of tokens, {length}"
            )


@cache
def select_linear_backend(name: str, device_type: str, dtype: torch.dtype) -> str:
    """Return the backend for this device and dtype; ``auto`` takes the fastest available.

    Raises:
        UserError: the backend does not exist, or cannot take this device or dtype.
    """
    if name == "auto":
        for candidate, backend in LINEAR.items():
            if backend.is_automatic_linear(device_type, dtype):
                return candidate
        return "chunked"
    if name not in LINEAR:
        raise UserError(
            f"attention_backend {name!r} has no linear attention; use one of auto,"
            f" {', '.join(LINEAR)}"
        )
    refusal = LINEAR[name].refusal(name, device_type, dtype)
    if refusal:
        raise UserError(refusal)
    return name


def scan_of(backend: str) -> Scan:
    """Return the scan function of a backend, named as by ``select_linear_backend``."""
    return BACKENDS[backend].linear_scan()


def decayed_state(state: Tensor, log_decay: Sequence[float], tokens: int) -> Tensor:
    """Decay a state, or its gradient, over ``tokens`` tokens of one document.

    ``state_after`` computes what these tokens add to the state.
    """
    rates = constants(tuple(log_decay), state.dtype, state.device)
    return state * (rates * tokens).exp()[:, None, None]


def state_after(
    k: Tensor, v: Tensor, log_decay: Sequence[float], remaining_tokens: Tensor
) -> Tensor:
    """Compute the part of a later state [B, H, D, E] that these tokens add.

    Args:
        remaining_tokens: [T], the number of tokens between each token and that state. The tokens
            may come in any order.
    """
    dtype = accum_dtype(k.dtype)
    rates = constants(tuple(log_decay), dtype, k.device)
    decay = (remaining_tokens[:, None] * rates).exp()  # [T, H]
    decayed_k = k.to(dtype) * decay[..., None]  # [B, T, H, D]
    return torch.einsum("bthd,bthe->bhde", decayed_k, v.to(dtype))


def from_state(
    q: Tensor,
    state: Tensor,
    log_decay: Sequence[float],
    tokens: int | None = None,
    *,
    reverse: bool = False,
) -> Tensor:
    """Compute what an incoming state adds to the scan of these tokens, ``[B, T, H, E]``.

    The result is in the state's dtype.

    Args:
        tokens: number of tokens that see the state: those of the first document, or of the last one
            with ``reverse``; by default all.
        reverse: go backwards in time, as in ``scan``.
    """
    length = q.shape[1]
    if tokens is None:
        tokens = length
    position = torch.arange(length, device=q.device)
    if reverse:
        distance = length - 1 - position
        visible = position >= length - tokens
    else:
        distance = position + 1
        visible = position < tokens
    rates = constants(tuple(log_decay), state.dtype, state.device)
    weights = (distance[:, None] * rates).exp() * visible[:, None]  # [T, H]
    out = q.transpose(1, 2).to(state.dtype) @ state  # [B, H, T, E]
    return out.transpose(1, 2) * weights[..., None]


def backward(
    scan: Scan,
    dout: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    *,
    accum_out: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dq, dk, dv and dstate, in the dtypes of the scan.

    Args:
        dfinal: gradient of the final state, None for 0.
        accum_out: return dk and dv in float32 or wider, so that a later state's part can be added.
    """
    state_t = None if state is None else state.mT
    dfinal_t = None if dfinal is None else dfinal.mT
    dq, _ = scan(dout, v, k, log_decay, state_t, cu_seqlens)
    dk, _ = scan(v, dout, q, log_decay, dfinal_t, cu_seqlens, reverse=True, accum_out=accum_out)
    dv, dstate = scan(k, q, dout, log_decay, dfinal, cu_seqlens, reverse=True, accum_out=accum_out)
    return dq, dk, dv, dstate
