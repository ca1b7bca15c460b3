"""Striped Attention (Brandon et al. 2023): every P-th token to a rank, so that each round's mask is a triangle."""

from parallel.context.method import Hop, Method, ring_hops


class Striped(Method):
    """Rank j owns tokens j, j + P, j + 2P, ...; every round of every rank has half a block's work."""

    name = "striped"

    def layout(self, causal: bool) -> str:
        return "striped"

    def hops(self, rank: int, size: int) -> list[Hop]:
        return ring_hops(rank, size)
