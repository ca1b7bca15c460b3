"""LASP (Sun et al. 2024) and LASP-2 (2025): linear attention that passes a state between ranks instead of KV.

Ranks hold consecutive tokens, so that of all earlier ranks a rank needs only the state after their tokens.
"""

from collections.abc import Sequence

from parallel.context.methods.base import Method, Ranks, Round, Send, Shape


class StateMethod(Method):
    """Contiguous tokens; KV stays, and states move as ``states`` says."""

    masks = ("causal",)
    layouts = ("contiguous",)

    def rounds(self, rank: Ranks, shape: Shape) -> Sequence[Round]:
        return [Round((rank,), (), Send(rank, 1))]


class Lasp(StateMethod):
    """Receive the state of rank - 1, add this rank's, and send the sum to rank + 1."""

    name = "lasp"
    states = "neighbour"


class Lasp2(StateMethod):
    """All-gather every rank's state; each rank sums those before it."""

    name = "lasp2"
    states = "gather"
