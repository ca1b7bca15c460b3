"""Linear attention with decay, forward and backward: backends, and the parts that context
parallelism needs.

With decay a (0 < a <= 1, one per head) the state S_t = a S_(t-1) + k_t v_t^T gives o_t = S_t^T q_t,
which is sum over s <= t of a^(t-s) (q_t . k_s) v_s (LASP, Sun et al. 2024, section 2;
TransNormerLLM, Qin et al. 2023). Factors are exponentials of (distance * log a), never quotients,
so none overflows.

Everything is one scan over the tokens (``kernels.linear_scan``); gradients are scans of other
tensors, or go backwards in time.

    out = scan(q, k, v, S)           dq = scan(dout, v, k, S^T) dv = scan_back(k, q, dout, G)    dk
    = scan_back(v, dout, q, G^T)    G: gradient of the outgoing state

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
    documents: Sequence[int] | None = None,
) -> None:
    """Raise ValueError for the first argument of ``linear_attention`` that is wrong."""
    batch, length, heads, width = q.shape
    if k.shape != q.shape or v.shape[:3] != q.shape[:3] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"linear attention takes q and k [B, T, H, D] and v [B, T, H, E] of one dtype, and got q {tuple(q.shape)} "
            f"{q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
        )
    if length == 0:
        raise ValueError("linear attention got no tokens; give at least one")
    if len(log_decay) != heads:
        raise ValueError(
            f"log_decay has {len(log_decay)} numbers for {heads} heads; give one per head"
        )
    for head, rate in enumerate(log_decay):
        if not (math.isfinite(rate) and rate <= 0):
            shown = math.inf if rate > 700 else math.exp(rate)
            raise ValueError(
                f"the decay of head {head} is {shown} (its logarithm {rate}); a decay lies above 0 and at most at 1"
            )
    check_sequence(length, (batch, heads, width, v.shape[-1]), state, documents)


def check_sequence(
    length: int, shape: tuple[int, ...], state: Tensor | None, documents: Sequence[int] | None
) -> None:
    """Raise ValueError for a state of another ``shape``, or documents that are not cumulative up to
    ``length``.
    """
    if state is not None and state.shape != shape:
        raise ValueError(
            f"the state has shape {tuple(state.shape)}; these q, k and v make it {shape}"
        )
    if documents is not None:
        rising = all(a < b for a, b in pairwise(documents))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != length or not rising:
            raise ValueError(
                f"documents is {tuple(documents)}; it must be cumulative lengths, rising from 0 to the {length} tokens"
            )


@cache
def select_linear_backend(name: str, device_type: str, dtype: torch.dtype) -> str:
    """Return the backend for this device and dtype; ``auto`` takes the fastest available.

    Raises:
        UserError: the backend does not exist, or cannot take this device or dtype.
    """
    if name == "auto":
        automatic = (
            other
            for other, backend in LINEAR.items()
            if backend.is_automatic_linear(device_type, dtype)
        )
        return next(automatic, "chunked")
    if name not in LINEAR:
        raise UserError(
            f"attention_backend is {name!r}, which has no linear attention; use auto, {', '.join(LINEAR)}"
        )
    if refusal := LINEAR[name].refusal(name, device_type, dtype):
        raise UserError(refusal)
    return name


def scan_of(backend: str) -> Scan:
    """Return the scan of a backend that ``select_linear_backend`` returned."""
    return BACKENDS[backend].linear_scan()


def decayed_state(state: Tensor, log_decay: Sequence[float], tokens: int) -> Tensor:
    """Decay a state (or its gradient) over ``tokens`` tokens of one document, without adding what
    they leave.
    """
    rates = constants(tuple(log_decay), state.dtype, state.device)
    return state * (rates * tokens).exp()[:, None, None]


def state_after(k: Tensor, v: Tensor, log_decay: Sequence[float], left: Tensor) -> Tensor:
    """Compute what these tokens add to the state [B, H, D, E] after ``left`` [T] more tokens each,
    in any order.
    """
    wide = accum_dtype(k.dtype)
    rates = constants(tuple(log_decay), wide, k.device)
    faded = k.to(wide) * (left[:, None] * rates).exp()[..., None]  # [B, T, H, D]
    return torch.einsum("bthd,bthe->bhde", faded, v.to(wide))


def from_state(
    q: Tensor,
    state: Tensor,
    log_decay: Sequence[float],
    tokens: int | None = None,
    *,
    reverse: bool = False,
) -> Tensor:
    """Compute what an incoming state adds to the scan of these tokens, ``[B, T, H, E]`` in the
    state's dtype.

    Args:
        tokens: how many see it, those of the first document (the last with ``reverse``); default
            all.
        reverse: backwards in time, see ``scan``.
    """
    length = q.shape[1]
    tokens = length if tokens is None else tokens
    place = torch.arange(length, device=q.device)
    distance = length - 1 - place if reverse else place + 1
    seen = place >= length - tokens if reverse else place < tokens
    rates = constants(tuple(log_decay), state.dtype, state.device)
    weights = (distance[:, None] * rates).exp() * seen[:, None]  # [T, H]
    out = q.transpose(1, 2).to(state.dtype) @ state  # [B, H, T, E]
    return out.transpose(1, 2) * weights[..., None]


def backward(
    run: Scan,
    dout: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    documents: Sequence[int] | None = None,
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and dstate; ``dfinal`` is the final state's gradient, None for 0.

    dtypes are as the scan has them, ``wide`` that of dk and dv, to which a later state's part can
    then be added.
    """
    dq, _ = run(dout, v, k, log_decay, None if state is None else state.mT, documents)
    dk, _ = run(
        v,
        dout,
        q,
        log_decay,
        None if dfinal is None else dfinal.mT,
        documents,
        reverse=True,
        wide=wide,
    )
    dv, dstate = run(k, q, dout, log_decay, dfinal, documents, reverse=True, wide=wide)
    return dq, dk, dv, dstate
