"""Exchange: every rank sends rows of its own KV straight to the ranks whose queries see them.

All rows are sent at once, and ranks need not keep in step. The method suits masks under which a
rank sees few keys: packed documents and windows. With several nodes, a row goes once to each node
that needs it, and is passed on there. A node's gradients are added up before they go to the owner.
So a row crosses to each node at most once.
"""

from parallel.context.layout import BALANCED, LAYOUTS
from parallel.context.methods.base import BalancedMethod, Ranks, Round, Send, Shape


class Exchange(BalancedMethod):
    """Within a node, round s computes with the KV of the rank s steps before.

    KV goes to another node through the rank with the same index there, which passes it on in a
    round that computes nothing. That rank itself computes with the KV last, after its neighbours,
    so it can add its own gradient to theirs. With 2 nodes of 3 ranks, rank 0 holds the KV of

        round   0   1   2   3   4   5   6
        rank    0   2   1   3   5   4   3

    and in round 3 passes on the KV of rank 3, which has the same index in the other node.
    """

    name = "exchange"
    layouts = (*LAYOUTS, BALANCED)
    nodes = needed_only = True

    def layout(self, causal: bool) -> str:
        return BALANCED

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        node_size = shape.per_node if shape.per_node > 1 else shape.size
        num_nodes = shape.size // node_size
        node, member = divmod(rank, node_size)

        def at(laps: int, steps: int) -> Ranks:
            """Return the rank this many nodes and steps ahead; negative numbers count back."""
            other_node = (node + laps) % num_nodes
            return other_node * node_size + (member + steps) % node_size

        # Rounds in which the KV of the other nodes arrives, one node after the other.
        rounds_per_lap = node_size + 1
        lap_starts = [node_size + lap * rounds_per_lap for lap in range(num_nodes - 1)]
        end = node_size + len(lap_starts) * rounds_per_lap
        neighbours = range(1, node_size)

        # Round 0 sends this rank's KV to its neighbours and to one rank of each other node.
        sends = [Send(at(0, s), s) for s in neighbours]
        sends += [Send(at(lap, 0), start) for lap, start in enumerate(lap_starts, 1)]
        rounds = [Round((rank,), tuple(sends), Send(rank, end))]
        rounds += [Round((at(0, -s),), (), Send(at(0, -s), end)) for s in neighbours]

        for lap, start in enumerate(lap_starts, 1):
            # The neighbours' gradients return to this rank, which sends their sum to the owner.
            last = start + node_size
            onward = [Send(at(0, s), start + s) for s in neighbours]
            onward.append(Send(rank, last))
            rounds.append(Round((at(-lap, 0),), tuple(onward), None))
            rounds += [Round((at(-lap, -s),), (), Send(at(0, -s), last)) for s in neighbours]
            rounds.append(Round((at(-lap, 0),), (), Send(at(-lap, 0), end)))
        return rounds
