"""LASP (Sun et al. 2024) and LASP-2 (2025): linear attention that passes a state between ranks instead of KV.

Ranks hold consecutive tokens, so that of all earlier ranks a rank needs only the state after their tokens.
"""

from collections.abc import Sequence

from parallel.context.methods.base import Capabilities, Hop, Method, Ranks, Send, Shape


class StateMethod(Method):
    """Contiguous tokens; KV stays, and states move as ``capabilities`` says."""

    def layout(self, causal: bool) -> str:
        return "contiguous"

    def hops(self, rank: Ranks, shape: Shape) -> Sequence[Hop]:
        return [Hop((rank,), (), Send(rank, 1))]


class Lasp(StateMethod):
    """Receive the state of rank - 1, add this rank's, and send the sum to rank + 1."""

    name = "lasp"

    def capabilities(self) -> Capabilities:
        return Capabilities(masks=("causal",), layouts=("contiguous",), states="neighbour")


class Lasp2(StateMethod):
    """All-gather every rank's state; each rank sums those before it."""

    name = "lasp2"

    def capabilities(self) -> Capabilities:
        return Capabilities(masks=("causal",), layouts=("contiguous",), states="gather")
