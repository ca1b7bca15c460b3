"""Masks: which keys a query sees. A mask may change with every micro-batch; ranks and groups do not depend on it."""

from dataclasses import dataclass
from itertools import pairwise
from operator import index

from parallel.context.errors import ContextError

Window = tuple[int, int]
"""Keys to the left and to the right that a query sees besides its own; -1 for all, as in Megatron."""
Reach = tuple[int | None, int | None]
"""The query at position p sees keys p - behind .. p + ahead of its document: (behind, ahead), None for all."""


@dataclass(frozen=True)
class Mask:
    """Visibility of a sequence's tokens: their document, up to themselves if causal, within a window."""

    causal: bool = True
    documents: tuple[int, ...] | None = None
    """Cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len); None for one."""
    window: Window | None = None

    @property
    def reach(self) -> Reach:
        """Return how far a query sees behind and ahead of itself."""
        left, right = self.window or (-1, -1)
        return None if left < 0 else left, 0 if self.causal else None if right < 0 else right

    @property
    def whole(self) -> bool:
        """Return whether the sequence is one document without a window."""
        return self.documents is None and self.window is None


def mask_of(causal: bool, documents: tuple[int, ...] | None, window: Window | None, seq_len: int) -> Mask:
    """Return the mask; equal ones compare equal.

    Raises:
        ContextError: boundaries do not ascend from 0 to ``seq_len``, or a window that sees nothing or the future.
    """
    return Mask(causal, _documents(documents, seq_len), _window(window, causal))


def _documents(documents: tuple[int, ...] | None, seq_len: int) -> tuple[int, ...] | None:
    """Check boundaries; return them as integers, so that equal ones share a plan."""
    if documents is not None:
        try:
            documents = tuple(index(x) for x in documents)
        except TypeError as error:
            raise ContextError(
                f"documents must be integers from 0 to seq_len {seq_len} and are {documents!r}"
            ) from error
        ascending = all(a < b for a, b in pairwise(documents))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len or not ascending:
            raise ContextError(f"documents must ascend from 0 to seq_len {seq_len} and are {documents}")
    return documents


def _window(window: Window | None, causal: bool) -> Window | None:
    if window is None:
        return None
    try:
        left, right = (index(x) for x in window)
    except (TypeError, ValueError) as error:
        raise ContextError(f"window must be two integers, (left, right), and is {window!r}") from error
    if left == 0 or left < -1:
        raise ContextError(f"window is {window}, whose left side is {left}; give 1 or more keys, or -1 for all")
    if causal and right not in (0, -1):
        raise ContextError(
            f"window is {window} under a causal mask, which sees nothing to the right; "
            f"use ({left}, 0), or full attention"
        )
    if not causal and (right == 0 or right < -1):
        raise ContextError(f"window is {window}, whose right side is {right}; give 1 or more keys, or -1 for all")
    if left == -1 and (causal or right == -1):
        return None
    return left, 0 if causal else right
