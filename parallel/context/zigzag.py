"""Zigzag ring: chunk r and its mirror image to rank r, so that any two ranks meet with the same work."""

from parallel.context.method import Hop, Method, ring_hops


class Zigzag(Method):
    """Of 2P chunks rank r owns r and 2P - 1 - r: balanced like striping, with long contiguous runs."""

    name = "zigzag"

    def layout(self, causal: bool) -> str:
        return "zigzag"

    def hops(self, rank: int, size: int) -> list[Hop]:
        return ring_hops(rank, size)
