"""Exchange: every rank sends rows of its own KV straight to the ranks whose queries see them, all
at once.

For masks of which a rank sees little: packed documents and windows. Ranks need not keep step. With
several nodes a row goes once to each node that needs it and on from there, and a node's gradients
add up before they go home.
"""

from parallel.context.layout import BALANCED, LAYOUTS
from parallel.context.methods.base import BalancedMethod, Ranks, Round, Send, Shape


class Exchange(BalancedMethod):
    """Within a node, round s computes with the KV of the rank s places before.

    For every other node, the rank at the same place gets it first and hands it on in a round that
    computes nothing; it computes with it after its neighbours have, so that their gradients add up
    with its own.
    """

    name = "exchange"
    layouts = (*LAYOUTS, BALANCED)
    nodes = needed_only = True

    def layout(self, causal: bool) -> str:
        return BALANCED

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        inner = shape.per_node if shape.per_node > 1 else shape.size
        nodes, (node, place) = shape.size // inner, divmod(rank, inner)

        def at(laps: int, steps: int) -> Ranks:
            """Return the rank so many nodes and places ahead."""
            return (node + laps) % nodes * inner + (place + steps) % inner

        first = [
            inner + lap * (inner + 1) for lap in range(nodes - 1)
        ]  # round in which a lap's KV arrives
        end = inner + len(first) * (inner + 1)
        sends = [Send(at(0, s), s) for s in range(1, inner)] + [
            Send(at(lap + 1, 0), i) for lap, i in enumerate(first)
        ]
        found = [Round((rank,), tuple(sends), Send(rank, end))]
        found += [Round((at(0, -s),), (), Send(at(0, -s), end)) for s in range(1, inner)]
        for lap, i in enumerate(first, start=1):
            handed = (*(Send(at(0, s), i + s) for s in range(1, inner)), Send(rank, i + inner))
            found.append(Round((at(-lap, 0),), handed, None))
            found += [
                Round((at(-lap, -s),), (), Send(at(0, -s), i + inner)) for s in range(1, inner)
            ]
            found.append(Round((at(-lap, 0),), (), Send(at(-lap, 0), end)))
        return found
