"""Rings: Ring Attention (Liu, Zaharia, Abbeel 2023), Striped Attention (Brandon et al. 2023),
zigzag, a double ring.

The first three differ in their layouts alone, and so in how a causal mask shares out the work.
"""

from parallel.context.layout import ContextError
from parallel.context.methods.base import BalancedMethod, Method, Ranks, Round, Send, Shape


class Ring(Method):
    """As many rounds as ranks: round i holds the KV of rank - i and passes it to rank + 1 (section
    3).

    Contiguous blocks; under a causal mask the last rank has twice the average work.
    """

    name = "ring"
    layouts = ("contiguous",)

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        last, following = shape.size - 1, (rank + 1) % shape.size
        found = []
        for i in range(shape.size):
            held = (rank - i) % shape.size
            on = Send(following, i + 1)
            found.append(
                Round((held,), (on,) if i < last else (), on if i < last else Send(held, i + 1))
            )
        return found


class Striped(Ring):
    """Rank j owns tokens j, j + P, j + 2P, ...; each round's mask is a triangle, half a block on
    every rank.
    """

    name = "striped"
    layouts = ("striped",)


class Zigzag(Ring):
    """Rank r owns chunks r and 2P - 1 - r of 2P: balanced like striping, with long contiguous runs."""

    name = "zigzag"
    layouts = ("zigzag",)


class DoubleRing(BalancedMethod):
    """KV goes once around each node (LoongTrain, Gu et al. 2024, section 4.3), and meanwhile from
    node to node.

    So does its gradient's: it accumulates along the inner ring, whose last rank sends the node's
    sum to the same place in the next node, which adds its own.
    """

    name = "double_ring"
    nodes = True

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        inner, nodes = shape.per_node, shape.size // shape.per_node
        node, place = divmod(rank, inner)
        beside = node * inner + (place + 1) % inner
        beyond = (node + 1) % nodes * inner + place
        found = []
        for i in range(shape.size):
            lap, step = divmod(i, inner)
            held = (node - lap) % nodes * inner + (place - step) % inner
            sends = [Send(beyond, i + inner)] if step == 0 and lap < nodes - 1 else []
            gradient = Send(beyond, i + inner) if lap < nodes - 1 else Send(held, i + 1)
            if step < inner - 1:
                gradient = Send(beside, i + 1)
                sends.append(gradient)
            found.append(Round((held,), tuple(sends), gradient))
        return found

    def check(self, shape: Shape, causal: bool) -> None:
        super().check(shape, causal)
        if shape.size % shape.per_node:
            fitting = [str(n) for n in range(1, shape.size + 1) if shape.size % n == 0]
            raise ContextError(
                f"context_parallel_ranks_per_node makes inner rings of {shape.per_node} in double_ring, which does not "
                f"divide the {shape.size} ranks (or groups of ulysses_degree ranks); what does: {', '.join(fitting)}"
            )
