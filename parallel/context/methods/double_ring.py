"""Double ring (LoongTrain, Gu et al. 2024, section 4.3): a ring of nodes around a ring inside each node."""

from parallel.context.errors import ContextError
from parallel.context.methods.base import BalancedMethod, Ranks, Round, Send, Shape


class DoubleRing(BalancedMethod):
    """KV goes once around each node; a transfer from another node overlaps a whole inner ring.

    So does its gradient's: it accumulates along the inner ring, whose last rank sends the node's sum to the same place
    in the next node, which adds its own.
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
