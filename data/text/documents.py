"""Documents of packed samples: where each begins, and positions that restart there. S tokens of a sample.

A document ends with its end-of-document token. A sample is cut from a stream, so its first document may have begun
before it and its last may go on after it; here both are documents of their own.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def document_starts(tokens: "Tensor", eod: int) -> "Tensor":
    """Mark the first token of every document of ``tokens`` [..., S]: bool [..., S]."""
    starts = tokens.roll(1, -1) == eod
    starts[..., 0] = True
    return starts


def positions_in_documents(starts: "Tensor") -> "Tensor":
    """Count each token's place in its document from 0, given ``starts`` [..., S]: int64 [..., S].

    Equal to the position ids of Megatron's ``_get_ltor_masks_and_position_ids`` with reset_position_ids.
    """
    places = starts.new_ones(starts.shape).cumsum(-1) - 1
    return places - (places * starts).cummax(-1).values


def cumulative_lengths(starts: "Tensor") -> tuple[int, ...]:
    """Return the cumulative lengths of the documents of ``starts`` [S], of which the first is set: (0, l1, ..., S)."""
    return *starts.nonzero().flatten().tolist(), len(starts)
