"""Segments of documents that Triton's scan goes through at once: how many, where they are cut, which have a state.

S segments, C tokens per chunk.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from runtime.copies import kept, to_device

MULTIPROCESSORS = 132
"""Of an H100 or H200; the same number on every GPU, so that they round alike. One has registers for one program."""
PROGRAMS = 4 * MULTIPROCESSORS
"""Programs to cut a scan into, at most: a few about equal waves of them."""


def parts_of(programs: int) -> int:
    """Return how many segments to cut a sequence into whose scan in one piece would be so many programs.

    1 if these keep four of five multiprocessors busy: to cut costs about a fifth more operations.
    """
    places = MULTIPROCESSORS * triton.cdiv(programs, MULTIPROCESSORS)
    return 1 if 5 * programs >= 4 * places else max(1, PROGRAMS // programs)


class Segments(NamedTuple):
    """S segments, of which N have a state ``[B, H, N, D, E]``: those of documents in several, of the first and last."""

    bounds: Tensor
    """int32 ``[2, S + 1]``: their cumulative lengths; the places of their states, or -1."""
    steps: Tensor
    """int32 ``[2, N + 1]``, of those with a state: their lengths; 1 where a document starts."""


@kept(64)  # packed documents differ from batch to batch; all layers of a step ask for the same
def segments_of(documents: tuple[int, ...], wanted: int, chunk: int, device: torch.device) -> Segments:
    """Cut documents into at least ``wanted`` segments of whole chunks, if they have as many; N <= 2 * (wanted + 1)."""
    chunks = [triton.cdiv(end - first, chunk) for first, end in pairwise(documents)]
    bounds, places, lengths, starts = list[int](), list[int](), list[int](), list[int]()
    for (first, end), count in zip(pairwise(documents), chunks, strict=True):
        parts = min(count, triton.cdiv(count * wanted, sum(chunks)))
        keeps = parts > 1 or first == 0 or end == documents[-1]
        cuts = [first + part * count // parts * chunk for part in range(parts)]
        for start, stop in pairwise([*cuts, end]):
            bounds.append(start)
            places.append(len(lengths) if keeps else -1)
            if keeps:
                lengths.append(stop - start)
                starts.append(int(start == first > 0))
    tables = [[*bounds, documents[-1]], [*places, -1]], [[*lengths, 0], [*starts, 0]]
    return Segments(*(to_device(torch.tensor(table, dtype=torch.int32), device) for table in tables))
