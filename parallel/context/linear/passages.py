"""Routes of linear attention's states: where each stretch of tokens gets its state, where it goes, and who sees it."""

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from parallel.context.layout import Layout


@dataclass(frozen=True)
class Passage:
    """The state's way through consecutive tokens of one rank; in the backward, its gradient's."""

    rank: int
    slot: int
    """Number of the stretch among those of its rank, by position."""
    offset: int
    """Its first token on its rank."""
    length: int
    source: int | None
    """Rank to receive from; None at the sequence's end, or if a document ends between the two."""
    target: int | None
    """Rank to send to, or None likewise."""
    goes_through: bool
    """True if the incoming state reaches the other end: no document ends inside."""
    seen: int
    """Tokens that see the incoming state: those of the first document, in the backward of the last."""
    documents: tuple[int, ...] | None
    """Cumulative lengths of the documents' parts in the stretch; None for one."""

    def of(self, x: Tensor) -> Tensor:
        """Return the stretch of x ``[B, T, ...]``."""
        return x.narrow(1, self.offset, self.length)


@lru_cache(maxsize=256)
def passages(layout: Layout, boundaries: tuple[int, ...], reverse: bool = False) -> tuple[Passage, ...]:
    """Return the passages of all ranks in the order in which the state, or (``reverse``) its gradient, takes them.

    Args:
        layout: one whose ranks hold consecutive tokens, in as many stretches each.
        boundaries: first positions of the documents after the first; padding is a document.
    """
    placed = []
    for rank in range(layout.size):
        offset = 0
        for slot, (start, length) in enumerate(layout.strides(rank)):
            placed.append((start, length, rank, slot, offset))
            offset += length
    placed.sort()
    found = []
    for number, (start, length, rank, slot, offset) in enumerate(placed):
        end = start + length
        inside = tuple(bound - start for bound in boundaries if start < bound < end)
        bounds = (0, *inside, length)
        before = placed[number - 1][2] if number and start not in boundaries else None
        after = placed[number + 1][2] if number + 1 < len(placed) and end not in boundaries else None
        source, target = (after, before) if reverse else (before, after)
        seen = bounds[-1] - bounds[-2] if reverse else bounds[1]
        documents = bounds if inside else None
        found.append(Passage(rank, slot, offset, length, source, target, not inside, seen, documents))
    return tuple(found[::-1] if reverse else found)
