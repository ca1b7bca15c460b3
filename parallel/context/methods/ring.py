"""Rings: Ring Attention (Liu, Zaharia, Abbeel 2023), Striped Attention (Brandon et al. 2023), and zigzag.

They differ in their layouts alone, and so in how a causal mask shares out the work.
"""

from parallel.context.methods.base import Method, Ranks, Round, Send, Shape


class Ring(Method):
    """As many rounds as ranks: round i holds the KV of rank - i and passes it to rank + 1 (section 3).

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
            found.append(Round((held,), (on,) if i < last else (), on if i < last else Send(held, i + 1)))
        return found


class Striped(Ring):
    """Rank j owns tokens j, j + P, j + 2P, ...; each round's mask is a triangle, half a block on every rank."""

    name = "striped"
    layouts = ("striped",)


class Zigzag(Ring):
    """Rank r owns chunks r and 2P - 1 - r of 2P: balanced like striping, with long contiguous runs."""

    name = "zigzag"
    layouts = ("zigzag",)
