"""Parts of a rank's segments, each of which one scan of the delta rule computes, in the order of its work."""

from collections import defaultdict
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.delta.rule import forgetting
from parallel.context.linear.segments import Segment, segments
from parallel.context.plan import Plan
from parallel.context.transport import Tensors


class Part(NamedTuple):
    """Segments of a rank that one scan computes."""

    segments: tuple[Segment, ...]
    wide: bool = False
    """True if it does not wait for the incoming state."""

    @property
    def link(self) -> Segment:
        """Return the only segment of a part that states enter or leave."""
        return self.segments[0]

    def of(self, x: Tensor) -> Tensor:
        """Return the part's tokens of x ``[B, T, ...]``."""
        found = [x[:, segment.tokens] for segment in self.segments]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Copy the part's tokens into x."""
        pieces = values.split([segment.length for segment in self.segments], 1)
        for segment, piece in zip(self.segments, pieces, strict=True):
            x[:, segment.tokens] = piece

    def inputs(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, g and beta, with gates that forget between documents."""
        q, k, v, g, beta = map(self.of, tensors)
        bounds = tuple(accumulate((segment.length for segment in self.segments), initial=0))
        return q, k, v, forgetting(g, bounds), beta


class Parts(NamedTuple):
    """Parts of a rank in the order of its work."""

    first: tuple[Part, ...]
    """Segments that begin a document which goes on elsewhere."""
    wide: tuple[Part, ...]
    whole: tuple[Part, ...]
    """One part of all documents that no other rank has tokens of; none if there is none."""
    last: tuple[Part, ...]
    """Segments that end a document and wait for its state."""

    @property
    def all(self) -> tuple[Part, ...]:
        """Return all parts."""
        return self.first + self.wide + self.whole + self.last


@lru_cache(maxsize=256)
def parts(plan: Plan, rank: int, *, waits: bool = False) -> Parts:
    """Return the parts of a rank, without padding, whatever that holds.

    With ``waits`` a segment that ends a document is never wide, however much of its rank it is.
    """
    found = defaultdict[str, list[Part]](list)
    whole = []
    for segment in segments(plan)[rank]:
        if segment.start >= plan.seq_len:
            continue
        if segment.before is None and segment.after is None:
            whole.append(segment)
        elif segment.before is None:
            found["first"].append(Part((segment,)))
        elif segment.after is not None or (segment.length > plan.local_len // 2 and not waits):
            found["wide"].append(Part((segment,), wide=True))
        else:
            found["last"].append(Part((segment,)))
    if whole:
        found["whole"].append(Part(tuple(whole)))
    return Parts(*(tuple(found[name]) for name in Parts._fields))
