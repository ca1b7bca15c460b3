"""Routes of linear attention's states: where each rank's comes from, where it goes, and which tokens see it."""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Passage:
    """The state's route at one rank; in the backward, its gradient's."""

    source: int | None
    """Rank to receive from; None at the sequence's end, or if a document ends between the two."""
    target: int | None
    """Rank to send to, or None likewise."""
    goes_through: bool
    """True if the incoming state reaches the other end: no document ends inside."""
    seen: int
    """Tokens that see the incoming state: those of the first document, in the backward of the last."""
    documents: tuple[int, ...] | None
    """Cumulative lengths of the documents' parts on this rank; None for one."""


@lru_cache(maxsize=256)
def passages(size: int, local_len: int, boundaries: tuple[int, ...], reverse: bool = False) -> tuple[Passage, ...]:
    """Return the passage of each of ``size`` ranks, for the state or (``reverse``) its gradient.

    Args:
        local_len: consecutive tokens of each rank.
        boundaries: first positions of the documents after the first; padding is a document.
    """

    def after(rank: int) -> int | None:
        """Return the next rank if it continues this one's last document, else None."""
        end = (rank + 1) * local_len
        return rank + 1 if 0 <= rank < size - 1 and end not in boundaries else None

    found = []
    for rank in range(size):
        starts = (start - rank * local_len for start in boundaries)
        inside = tuple(start for start in starts if 0 < start < local_len)
        bounds = (0, *inside, local_len)
        ends = None if after(rank - 1) is None else rank - 1, after(rank)
        source, target = reversed(ends) if reverse else ends
        seen = bounds[-1] - bounds[-2] if reverse else bounds[1]
        found.append(Passage(source, target, not inside, seen, bounds if inside else None))
    return tuple(found)
