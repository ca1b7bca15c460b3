"""The scan of linear attention in torch, chunk by chunk; shapes as in ``kernels.linear_attention``."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from runtime.tensors import accum_dtype, cached_on_device, constants, to_device

SCAN_CHUNK = 64
"""Tokens of a chunk, so that memory and time are linear in the number of tokens."""


@dataclass(frozen=True)
class Chunks:
    """Assignment of tokens to chunks; no chunk spans two documents."""

    index: Tensor | None
    """Token at each place [N * C], arbitrary at empty places; None if all places are filled in
    order.
    """
    places: Tensor | None
    """Place of each token [T]; None as above. A mask instead would force a GPU sync to count its
    entries.
    """
    lengths: Tensor
    """Tokens per chunk [N]."""
    begins: tuple[bool, ...]
    """True if each chunk is the first of its document."""


@cached_on_device(64)  # packed documents differ from batch to batch
def chunks_of(length: int, documents: tuple[int, ...] | None, device: torch.device) -> Chunks:
    """Chunk packed documents of these cumulative lengths; by default one document of ``length``
    tokens.
    """
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
    index = (
        (torch.tensor(starts)[:, None] + torch.arange(SCAN_CHUNK)).clamp(max=length - 1).flatten()
    )
    places = (torch.arange(SCAN_CHUNK) < counts[:, None]).flatten().nonzero().flatten()
    return Chunks(
        to_device(index, device),
        to_device(places, device),
        to_device(counts, device),
        tuple(begins),
    )


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

    Forwards, a token reads a state that includes its own key and value. Backwards (``reverse``),
    time is mirrored: ``state`` is the gradient of the state after the last token, final that of the
    state before the first.

    Returns:
        out ``[B, T, H, E]``, empty if q is None, and final ``[B, H, D, E]`` in float32 or wider.
        out may be in v's dtype but with ``wide``, so that more can be added to it; here it always
        is in float32 or wider.
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
    """Return decay^exponent [N, H, C, 1] for exponents [N, C] >= 0: a single exponential, which
    cannot overflow.
    """
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
