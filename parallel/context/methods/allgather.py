"""All-gather attention (Llama 3, section 3.3.2): every rank gathers all KV once, then works alone."""

from dataclasses import replace

from parallel.context.layout import BALANCED, LAYOUTS
from parallel.context.methods.base import BalancedMethod, Capabilities, Hop, Ranks, Send, Shape


class AllGather(BalancedMethod):
    """One collective and one round; holds the whole sequence's KV in memory."""

    name = "allgather"

    def hops(self, rank: Ranks, shape: Shape) -> list[Hop]:
        return [Hop(tuple(range(shape.size)), (), Send(rank, 1))]

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), layouts=(*LAYOUTS, BALANCED))
