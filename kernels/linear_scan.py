"""Scan of linear attention in torch, chunk by chunk; shapes as in ``kernels.linear_attention``."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from runtime.tensors import accum_dtype, cached_on_device, constants, to_device

SCAN_CHUNK = 64
"""Number of tokens in a chunk; chunks make memory and time linear in the number of tokens."""


@dataclass(frozen=True)
class Chunks:
    """Assignment of tokens to chunks; no chunk spans two documents.

    A chunk has C slots for tokens. The last chunk of a document may leave some of them empty.
    """

    index: Tensor | None
    """Token in each slot [N * C], arbitrary in empty slots; None if all slots are filled in order.
    """
    slots: Tensor | None
    """Slot of each token [T]; None if ``index`` is None. A mask instead would make the host wait
    for a GPU to count its entries."""
    lengths: Tensor
    """Number of tokens in each chunk [N]."""
    starts_document: tuple[bool, ...]
    """For each chunk, True if it is the first of its document."""


@cached_on_device(64)  # packed documents differ in each batch
def chunks_of(length: int, cu_seqlens: tuple[int, ...] | None, device: torch.device) -> Chunks:
    """Split documents of these cumulative lengths, or one of ``length`` tokens, into chunks."""
    starts = []
    lengths = []
    starts_document = []
    for first, end in pairwise(cu_seqlens or (0, length)):
        for start in range(first, end, SCAN_CHUNK):
            starts.append(start)
            lengths.append(min(SCAN_CHUNK, end - start))
            starts_document.append(start == first)

    counts = torch.tensor(lengths)
    if all(count == SCAN_CHUNK for count in lengths):
        return Chunks(None, None, to_device(counts, device), tuple(starts_document))

    offset = torch.arange(SCAN_CHUNK)
    index = (torch.tensor(starts)[:, None] + offset).clamp(max=length - 1).flatten()
    slots = (offset < counts[:, None]).flatten().nonzero().flatten()
    return Chunks(
        to_device(index, device),
        to_device(slots, device),
        to_device(counts, device),
        tuple(starts_document),
    )


def scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_decay: Sequence[float],
    state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    *,
    reverse: bool = False,
    accum_out: bool = True,
) -> tuple[Tensor, Tensor]:
    """Scan the tokens, starting from an incoming state.

    Forwards, a token reads a state that includes its own key and value. Backwards (``reverse``),
    time is mirrored: ``state`` is the gradient of the state after the last token, and final is the
    gradient of the state before the first token.

    A chunk's output is the sum of two parts: attention among the chunk's own tokens, with scores
    that decay with distance, and the product of the queries and the state that enters the chunk.
    The states between chunks come from a short recurrence that adds one chunk at a time.

    Returns:
        out ``[B, T, H, E]``, empty if q is None, and final ``[B, H, D, E]`` in float32 or wider.
        Other backends return out in v's dtype, and in float32 or wider with ``accum_out``, so that
        more can be added to it; this one always returns float32 or wider.
    """
    dtype = accum_dtype(k.dtype)
    if cu_seqlens is not None:
        cu_seqlens = tuple(cu_seqlens)
    chunks = chunks_of(k.shape[1], cu_seqlens, k.device)
    rates = constants(tuple(log_decay), dtype, k.device)  # [H]
    slot = torch.arange(SCAN_CHUNK, device=k.device)  # [C]
    lengths = chunks.lengths[:, None]  # [N, 1]
    filled = slot < lengths  # [N, C]
    before = slot.expand_as(filled) + 1
    after = (lengths - 1 - slot).clamp(min=0)
    read_exponents = after if reverse else before
    write_exponents = before if reverse else after

    # k is zero in empty slots, so whatever q and v hold there adds nothing.
    filled = filled[:, None, :, None]  # [N, 1, C, 1]
    decayed_k = _chunked(k, chunks, dtype) * (_power(rates, write_exponents) * filled)
    values = _chunked(v, chunks, dtype)  # [B, N, H, C, E]
    added = decayed_k.transpose(-1, -2) @ values  # [B, N, H, D, E]
    del decayed_k  # as large as all keys in float32
    chunk_decay = _power(rates, lengths)  # [N, H, 1, 1]
    entering, final = _carry(added, chunk_decay, state, chunks.starts_document, reverse)
    if q is None:
        return final.new_empty(0), final

    queries = _chunked(q, chunks, dtype)  # [B, N, H, C, D]
    distance = slot[:, None] - slot  # [C, C]
    if reverse:
        distance = -distance
    exponents = rates[:, None, None] * distance.clamp(min=0)
    mask = exponents.exp() * (distance >= 0)  # [H, C, C]
    keys = _chunked(k, chunks, dtype) * filled
    out = (queries @ keys.transpose(-1, -2) * mask) @ values
    out += queries @ entering * _power(rates, read_exponents)
    out = out.transpose(2, 3).flatten(1, 2)  # [B, N * C, H, E]
    if chunks.slots is not None:
        out = out.index_select(1, chunks.slots)  # [B, T, H, E]
    return out, final


def _chunked(x: Tensor, chunks: Chunks, dtype: torch.dtype) -> Tensor:
    """Map [B, T, H, D] to [B, N, H, C, D]."""
    if chunks.index is not None:
        x = x.index_select(1, chunks.index)
    return x.unflatten(1, (-1, SCAN_CHUNK)).transpose(2, 3).to(dtype)


def _power(rates: Tensor, exponents: Tensor) -> Tensor:
    """Return decay^exponent [N, H, C, 1] for exponents [N, C] >= 0.

    Computed as a single exponential of rates * exponents, which cannot overflow.
    """
    return (rates[:, None] * exponents[:, None, :]).exp()[..., None]


def _carry(
    added: Tensor,
    chunk_decay: Tensor,
    state: Tensor | None,
    starts_document: tuple[bool, ...],
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Return the states entering the chunks [B, N, H, D, E] and the final state [B, H, D, E]."""
    if state is None:
        running = torch.zeros_like(added[:, 0])
    else:
        running = state.to(added.dtype)
    entering = torch.empty_like(added)
    count = len(starts_document)
    for n in reversed(range(count)) if reverse else range(count):
        if reverse:
            resets = n + 1 < count and starts_document[n + 1]
        else:
            resets = n > 0 and starts_document[n]
        entering[:, n] = 0 if resets else running
        running = torch.addcmul(added[:, n], entering[:, n], chunk_decay[n])
    return entering, running
