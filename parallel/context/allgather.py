"""All-gather attention (Llama 3, section 3.3.2): every rank gathers all KV once, then works alone."""

from parallel.context.method import Hop, Method


class AllGather(Method):
    """One collective and one round; memory for the KV of the whole sequence."""

    name = "allgather"

    def layout(self, causal: bool) -> str:
        return "zigzag" if causal else "contiguous"

    def hops(self, rank: int, size: int) -> list[Hop]:
        return [Hop(tuple(range(size)), None, None)]
