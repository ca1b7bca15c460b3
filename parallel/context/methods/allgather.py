"""All-gather attention (Llama 3, section 3.3.2): every rank gathers all KV once, then works alone."""

from parallel.context.layout import BALANCED, LAYOUTS
from parallel.context.methods.base import BalancedMethod, Ranks, Round, Send, Shape


class AllGather(BalancedMethod):
    """One collective and one round; holds the whole sequence's KV in memory."""

    name = "allgather"
    layouts = (*LAYOUTS, BALANCED)

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        return [Round(tuple(range(shape.size)), (), Send(rank, 1))]
