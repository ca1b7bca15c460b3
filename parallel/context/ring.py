"""Ring Attention (Liu, Zaharia, Abbeel 2023): contiguous blocks, KV passed around a ring."""

from parallel.context.method import Hop, Method, ring_hops


class Ring(Method):
    """Contiguous blocks; under a causal mask the last rank has twice the average work."""

    name = "ring"

    def layout(self, causal: bool) -> str:
        return "contiguous"

    def hops(self, rank: int, size: int) -> list[Hop]:
        return ring_hops(rank, size)
