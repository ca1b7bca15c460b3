"""What becomes of a state of linear attention at every rank: where it comes from and goes, and who sees it."""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Passage:
    """What becomes of the state at one rank; backwards in time, of its gradient."""

    source: int | None
    """The rank it comes from; None at the sequence's end, or where a document ends between the two."""
    target: int | None
    """The rank that it goes on to."""
    goes_through: bool
    """Whether what comes in reaches the other end: no document ends inside."""
    seen: int
    """How many tokens see what comes in: those of the first document, or backwards of the last."""
    documents: tuple[int, ...] | None
    """Cumulative lengths of the parts of documents that lie here; None for one."""


@lru_cache(maxsize=256)
def passages(size: int, local_len: int, boundaries: tuple[int, ...], reverse: bool = False) -> tuple[Passage, ...]:
    """What each of ``size`` ranks does with the state, forwards, or backwards with its gradient.

    Args:
        local_len: consecutive tokens of each rank.
        boundaries: first positions of the documents after the first; padding is a document.
    """

    def after(rank: int) -> int | None:
        """The next rank, where it goes on with this one's last document."""
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
