"""LASP (Sun et al. 2024) and LASP-2 (2025): linear attention that passes a state between ranks instead of KV.

Ranks hold stretches of consecutive tokens; for each, a rank needs only the state after the tokens before it.
"""

from parallel.context.methods.base import Method


class StateMethod(Method):
    """Contiguous tokens, or zigzag; KV stays, and states move as ``states`` says."""

    masks = ("causal",)
    layouts = ("contiguous", "zigzag")


class Lasp(StateMethod):
    """Receive the state after the tokens before, add this stretch's, and send the sum to the next stretch's rank."""

    name = "lasp"
    states = "neighbour"


class Lasp2(StateMethod):
    """All-gather every stretch's state; each rank sums those before its own."""

    name = "lasp2"
    states = "gather"
