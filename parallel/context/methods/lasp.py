"""LASP (Sun et al. 2024) and LASP-2 (2025): linear attention, whose ranks pass one state on instead of keys and values.

A rank's tokens follow those of the rank before it, so that what it needs of all of these is the state after them.
"""

from collections.abc import Sequence

from parallel.context.methods.base import Capabilities, Hop, Method, Ranks, Send, Shape


class StateMethod(Method):
    """Contiguous tokens, no keys or values that move; the states do, on the way that ``capabilities`` names."""

    def layout(self, causal: bool) -> str:
        return "contiguous"

    def hops(self, rank: Ranks, shape: Shape) -> Sequence[Hop]:
        return [Hop((rank,), (), Send(rank, 1))]


class Lasp(StateMethod):
    """From neighbour to neighbour: the state of rank - 1 comes in, and goes on to rank + 1 with this rank's added."""

    name = "lasp"

    def capabilities(self) -> Capabilities:
        return Capabilities(masks=("causal",), layouts=("contiguous",), states="neighbour")


class Lasp2(StateMethod):
    """One all-gather of what every rank adds; each rank then sums what precedes it."""

    name = "lasp2"

    def capabilities(self) -> Capabilities:
        return Capabilities(masks=("causal",), layouts=("contiguous",), states="gather")
