"""Scans of the gated delta rule over any tokens, in slabs of chunks: memory and time linear in the number of tokens.

A slab is computed by ``kernels.delta.chunks`` in torch or by ``kernels.triton.delta`` on a GPU. The states between
slabs are kept, and all else is computed again in the backward.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import installed
from kernels.delta import chunks
from kernels.delta.chunks import CHUNK
from kernels.triton import has_triton, interpreted
from runtime.errors import UserError

DELTA_BACKENDS = ("chunked", "triton", "fla", "reference")
CPU_CHUNKS, GPU_CHUNKS = 32, 4096
"""Chunks of all rows in one slab."""
WIDEST = 256
"""Channels of keys that the Triton kernels take."""


class Slabs(NamedTuple):
    """The rule of a slab by one backend; arguments as of ``kernels.delta.chunks``."""

    forward: Callable[[tuple[Tensor, ...], Tensor, Tensor, Tensor], None]
    backward: Callable[[tuple[Tensor, ...], Tensor, Tensor, Tensor, tuple[Tensor, ...]], Tensor]


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
    gates per channel, wider keys and float32, whose products by TF32 are slower than torch's. ``fla`` is
    flash-linear-attention, for whole documents on a GPU; ``auto`` never takes it, as strong gates cost it digits.

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
    if name in ("triton", "fla"):
        here = interpreted() if name == "triton" else False
        problems = {
            "is not installed": not (has_triton() if name == "triton" else installed.has_fla()),
            f"needs a cuda device and this one is {device_type}": device_type != "cuda" and not here,
            f"takes no {dtype} in the delta rule": dtype not in (torch.bfloat16, torch.float16, torch.float32),
            "takes gates per head in the delta rule, and these are per channel": per_channel,
            f"takes keys of up to {WIDEST} channels in the delta rule, and these have {width}": width > WIDEST,
        }
        for problem in (text for text, found in problems.items() if found):
            raise UserError(f"attention_backend {name} {problem}; use auto or chunked")
    return name


def slabs_by(backend: str, k: Tensor, g: Tensor) -> Slabs:
    """Return the backend for these keys and gates, ``chunked`` for ``reference``, which has no scan."""
    asked = "chunked" if backend == "reference" else backend
    name = select_delta_backend(asked, k.device.type, k.dtype, per_channel=g.ndim == 4, width=k.shape[-1])
    if name == "fla":
        raise UserError("backend fla passes no states between ranks; use auto, triton or chunked")
    if name == "triton":
        from kernels.triton import delta, delta_backward

        return Slabs(delta.forward, delta_backward.backward)
    return Slabs(chunks.forward, chunks.backward)


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return out ``[B, T, H, E]`` and the states ``[S + 1, B, H, D, E]`` before each slab and after the last token.

    Both are in float32 or wider. Arguments as of ``kernels.delta.rule.delta_rule``; a gate of -inf forgets all before
    its token.
    """
    start = _zero_state(k, v) if state is None else state
    return _scan((q, k, v, g, beta), start, backend)


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
    out, states = _scan((q, k, v, g, beta), start, backend)
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
    run = slabs_by(backend, k, g).backward
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


def _scan(inputs: tuple[Tensor, ...], state: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Scan slab after slab, with as many columns as the state has."""
    _, k, v, g, _ = inputs
    slabs, run = _slabs(k, v), slabs_by(backend, k, g).forward
    states = state.new_empty(len(slabs) + 1, *state.shape)
    states[0] = state
    out = state.new_empty(*v.shape[:3], state.shape[-1])
    for n, slab in enumerate(slabs):
        run(tuple(x[:, slab] for x in inputs), states[n], out[:, slab], states[n + 1])
    return out, states


def _slabs(k: Tensor, v: Tensor) -> list[slice]:
    """Cut the tokens into slabs of whole chunks, whose temporaries a processor's cache holds."""
    rows = v.shape[0] * v.shape[2]
    step = CHUNK * max(1, (CPU_CHUNKS if v.device.type == "cpu" else GPU_CHUNKS) // rows)
    return [slice(first, first + step) for first in range(0, k.shape[1], step)]


def _zero_state(k: Tensor, v: Tensor) -> Tensor:
    wide = torch.promote_types(k.dtype, torch.float32)
    return v.new_zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), dtype=wide)
