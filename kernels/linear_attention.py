"""Linear attention with decay, forward and backward: backends, and the parts that context parallelism needs.

With decay a (0 < a <= 1, one per head) the state S_t = a S_(t-1) + k_t v_t^T gives o_t = S_t^T q_t, which is
sum over s <= t of a^(t-s) (q_t . k_s) v_s (LASP, Sun et al. 2024, section 2; TransNormerLLM, Qin et al. 2023). Factors
are exponentials of (distance * log a), never quotients, so none overflows.

Everything is one scan over the tokens (``Scan``); gradients are scans of other tensors or backwards in time.

    out = scan(q, k, v, S)           dq = scan(dout, v, k, S^T)
    dv = scan_back(k, q, dout, G)    dk = scan_back(v, dout, q, G^T)    G: gradient of the outgoing state

The result is linear in the incoming state, so a rank that holds part of a sequence computes all but ``from_state``
before the state of earlier ranks arrives.

Shapes: q, k ``[B, T, H, D]``, v ``[B, T, H, E]``, states ``[B, H, D, E]`` in float32 or wider; N chunks of C tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.triton import has_triton, interpreted
from runtime.errors import UserError
from runtime.tensors import accum_dtype, cached_on_device, constants, differentiable, to_device

BACKENDS = ("chunked", "triton", "reference")
SCAN_CHUNK = 64
"""Tokens of a chunk of the scan in torch, whose memory and time are linear in the number of tokens."""
Scan = Callable[..., tuple[Tensor, Tensor]]
"""One pass over the tokens, as ``scan``."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    *,
    documents: Sequence[int] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute causal linear attention; differentiable in q, k, v and state.

    Args:
        log_decay: log of each head's decay, H numbers <= 0.
        state: state before the first token, default zero; only tokens of the first document see it.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., T); each resets the state.
        backend: as for ``select_linear_backend``.

    Returns:
        out ``[B, T, H, E]`` in v's dtype, and the state after the last token (of the last document).

    Raises:
        ValueError: a decay outside (0, 1], or shapes that do not match.
    """
    log_decay = tuple(log_decay)
    check(q, k, v, log_decay, state, documents)
    name = select_linear_backend(backend, q.device.type, q.dtype)
    if name == "reference":
        return reference.linear_attention(q, k, v, log_decay, state, documents=documents)
    return torch.ops.longmesh.linear_attention(q, k, v, state, log_decay, documents, name)


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
        raise ValueError(f"log_decay has {len(log_decay)} numbers for {heads} heads; give one per head")
    for head, rate in enumerate(log_decay):
        if not (math.isfinite(rate) and rate <= 0):
            shown = math.inf if rate > 700 else math.exp(rate)
            raise ValueError(
                f"the decay of head {head} is {shown} (its logarithm {rate}); a decay lies above 0 and at most at 1"
            )
    check_sequence(length, (batch, heads, width, v.shape[-1]), state, documents)


def check_sequence(length: int, shape: tuple[int, ...], state: Tensor | None, documents: Sequence[int] | None) -> None:
    """Raise ValueError for a state of another ``shape``, or documents that are not cumulative up to ``length``."""
    if state is not None and state.shape != shape:
        raise ValueError(f"the state has shape {tuple(state.shape)}; these q, k and v make it {shape}")
    if documents is not None:
        rising = all(a < b for a, b in pairwise(documents))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != length or not rising:
            raise ValueError(
                f"documents is {tuple(documents)}; it must be cumulative lengths, rising from 0 to the {length} tokens"
            )


@cache
def select_linear_backend(name: str, device_type: str, dtype: torch.dtype) -> str:
    """Return the backend for this device and dtype; ``auto`` takes the fastest available.

    ``chunked`` is torch on any device, ``triton`` the fused GPU kernel, ``reference`` the naive form, with memory
    quadratic in the tokens.

    Raises:
        UserError: the backend does not exist, or cannot take this device or dtype.
    """
    if name == "auto":  # in float32 torch's matmuls are faster: the kernel's state spills
        fused = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_triton()
        return "triton" if fused else "chunked"
    if name not in BACKENDS:
        raise UserError(
            f"attention_backend is {name!r}, which has no linear attention; use auto, {', '.join(BACKENDS)}"
        )
    if name == "triton":
        if not has_triton():
            raise UserError("attention_backend is triton, which is not installed; use auto or chunked")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"attention_backend triton takes no {dtype}; use chunked")
        if device_type != "cuda" and not interpreted():
            raise UserError(
                f"attention_backend triton needs a cuda device and this one is {device_type}; use auto or chunked"
            )
    return name


def scan_of(backend: str) -> Scan:
    """Return the scan of a backend that ``select_linear_backend`` returned."""
    if backend == "triton":
        from kernels.triton import linear_attention as fused

        return fused.scan
    return scan


@dataclass(frozen=True)
class Chunks:
    """Assignment of tokens to chunks; no chunk spans two documents."""

    index: Tensor | None
    """Token at each place [N * C], arbitrary at empty places; None if all places are filled in order."""
    places: Tensor | None
    """Place of each token [T]; None as above. A mask instead would force a GPU sync to count its entries."""
    lengths: Tensor
    """Tokens per chunk [N]."""
    begins: tuple[bool, ...]
    """True if each chunk is the first of its document."""


@cached_on_device(64)  # packed documents differ from batch to batch
def chunks_of(length: int, documents: tuple[int, ...] | None, device: torch.device) -> Chunks:
    """Chunk packed documents of these cumulative lengths; by default one document of ``length`` tokens."""
    bounds = documents or (0, length)
    starts, lengths, begins = [], [], []
    for first, end in pairwise(bounds):
        for start in range(first, end, SCAN_CHUNK):
            starts.append(start)
            lengths.append(min(SCAN_CHUNK, end - start))
            begins.append(start == first)
    counts = torch.tensor(lengths)
    if all(count == SCAN_CHUNK for count in lengths):
        return Chunks(None, None, to_device(counts, device), tuple(begins))
    index = (torch.tensor(starts)[:, None] + torch.arange(SCAN_CHUNK)).clamp(max=length - 1).flatten()
    places = (torch.arange(SCAN_CHUNK) < counts[:, None]).flatten().nonzero().flatten()
    return Chunks(to_device(index, device), to_device(places, device), to_device(counts, device), tuple(begins))


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    documents: Sequence[int] | None = None,
    *,
    reverse: bool = False,
    wide: bool = True,
) -> tuple[Tensor, Tensor]:
    """Scan the tokens, from an incoming state.

    Forwards, a token reads a state that includes its own key and value. Backwards (``reverse``), time is mirrored:
    ``state`` is the gradient of the state after the last token, final that of the state before the first.

    Returns:
        out ``[B, T, H, E]``, empty if q is None, and final ``[B, H, D, E]`` in float32 or wider. out may be in v's
        dtype but with ``wide``, so that more can be added to it; here it always is in float32 or wider.
    """
    dtype = accum_dtype(k.dtype)
    chunks = chunks_of(k.shape[1], None if documents is None else tuple(documents), k.device)
    rates = constants(tuple(log_decay), dtype, k.device)
    place = torch.arange(SCAN_CHUNK, device=k.device)
    filled = place < chunks.lengths[:, None]  # [N, C]
    before, after = place.expand_as(filled) + 1, (chunks.lengths[:, None] - 1 - place).clamp(min=0)
    reads, writes = (after, before) if reverse else (before, after)

    # Empty places of k are zero, so what q and v hold there adds nothing.
    keys = _chunked(k, chunks, dtype) * (_power(rates, writes) * filled[:, None, :, None])
    values = _chunked(v, chunks, dtype)  # [B, N, H, C, E]
    added = keys.transpose(-1, -2) @ values  # [B, N, H, D, E]
    carried = _power(rates, chunks.lengths[:, None])  # [N, H, 1, 1]
    entering, final = _carry(added, carried, state, chunks.begins, reverse)
    if q is None:
        return final.new_empty(0), final

    queries = _chunked(q, chunks, dtype)
    distance = place[:, None] - place
    distance = -distance if reverse else distance
    mask = (rates[:, None, None] * distance.clamp(min=0)).exp() * (distance >= 0)  # [H, C, C]
    keys = _chunked(k, chunks, dtype) * filled[:, None, :, None]
    out = (queries @ keys.transpose(-1, -2) * mask) @ values
    out += queries @ entering * _power(rates, reads)
    out = out.transpose(2, 3).flatten(1, 2)  # [B, N * C, H, E]
    return out if chunks.places is None else out.index_select(1, chunks.places), final


def _chunked(x: Tensor, chunks: Chunks, dtype: torch.dtype) -> Tensor:
    """Map [B, T, H, D] to [B, N, H, C, D]."""
    x = x if chunks.index is None else x.index_select(1, chunks.index)
    return x.unflatten(1, (-1, SCAN_CHUNK)).transpose(2, 3).to(dtype)


def _power(rates: Tensor, exponents: Tensor) -> Tensor:
    """Return decay^exponent [N, H, C, 1] for exponents [N, C] >= 0: a single exponential, which cannot overflow."""
    return (rates[:, None] * exponents[:, None, :]).exp()[..., None]


def _carry(
    added: Tensor, carried: Tensor, state: Tensor | None, begins: tuple[bool, ...], reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the states entering the chunks [B, N, H, D, E] and the final state [B, H, D, E]."""
    running = torch.zeros_like(added[:, 0]) if state is None else state.to(added.dtype)
    entering = torch.empty_like(added)
    count = len(begins)
    for n in reversed(range(count)) if reverse else range(count):
        if reverse and n + 1 < count:
            fresh = begins[n + 1]
        else:
            fresh = not reverse and n > 0 and begins[n]
        entering[:, n] = 0 if fresh else running
        running = torch.addcmul(added[:, n], entering[:, n], carried[n])
    return entering, running


def decayed_state(state: Tensor, log_decay: Sequence[float], tokens: int) -> Tensor:
    """Decay a state (or its gradient) over ``tokens`` tokens of one document, without adding what they leave."""
    rates = constants(tuple(log_decay), state.dtype, state.device)
    return state * (rates * tokens).exp()[:, None, None]


def state_after(k: Tensor, v: Tensor, log_decay: Sequence[float], left: Tensor) -> Tensor:
    """Compute what these tokens add to the state [B, H, D, E] after ``left`` [T] more tokens each, in any order."""
    wide = accum_dtype(k.dtype)
    rates = constants(tuple(log_decay), wide, k.device)
    faded = k.to(wide) * (left[:, None] * rates).exp()[..., None]  # [B, T, H, D]
    return torch.einsum("bthd,bthe->bhde", faded, v.to(wide))


def from_state(
    q: Tensor, state: Tensor, log_decay: Sequence[float], tokens: int | None = None, *, reverse: bool = False
) -> Tensor:
    """Compute what an incoming state adds to the scan of these tokens, ``[B, T, H, E]`` in the state's dtype.

    Args:
        tokens: how many see it, those of the first document (the last with ``reverse``); default all.
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

    dtypes are as the scan has them, ``wide`` that of dk and dv, to which a later state's part can then be added.
    """
    dq, _ = run(dout, v, k, log_decay, None if state is None else state.mT, documents)
    dk, _ = run(v, dout, q, log_decay, None if dfinal is None else dfinal.mT, documents, reverse=True, wide=wide)
    dv, dstate = run(k, q, dout, log_decay, dfinal, documents, reverse=True, wide=wide)
    return dq, dk, dv, dstate


def _forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, log_decay: Any, documents: Any, backend: str
) -> tuple[Tensor, Tensor]:
    out, final = scan_of(backend)(q, k, v, log_decay, state, documents)
    return out.to(v.dtype), final


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = accum_dtype(q.dtype)
    return v.new_empty(v.shape), k.new_empty((k.shape[0], *k.shape[2:], v.shape[-1]), dtype=wide)


def _backward(
    dout: Tensor, dfinal: Any, q: Tensor, k: Tensor, v: Tensor, state: Any, log_decay: Any, documents: Any, backend: str
) -> tuple[Tensor, ...]:
    return backward(scan_of(backend), dout, dfinal, q, k, v, log_decay, state, documents)


differentiable(
    "longmesh::linear_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? state",
    "float[] log_decay, int[]? documents, str backend",
    *(_forward, _fake, _backward),
)
