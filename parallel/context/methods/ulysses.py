"""DeepSpeed Ulysses (Jacobs et al. 2023): one all-to-all gives each rank all tokens of some heads, another undoes it.

Its degree is an option of every method: groups of so many neighbours split the heads, and the method runs over the
groups. The method alone has one group of all ranks and one round.
"""

from parallel.context.errors import ContextError
from parallel.context.methods.base import Method, Shape


class Ulysses(Method):
    """Contiguous blocks by default: after the all-to-all every rank has the same work, whatever the layout."""

    name = "ulysses"
    splits_heads = True

    def check(self, shape: Shape, causal: bool) -> None:
        super().check(shape, causal)
        if shape.size != 1:
            raise ContextError(
                f"method ulysses splits the heads among all ranks, and ulysses_degree leaves {shape.size} groups; "
                "leave it out, or choose another method to run over the groups"
            )
