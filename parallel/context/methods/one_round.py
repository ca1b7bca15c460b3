"""Methods of one round: all-gather, DeepSpeed Ulysses, and LASP, whose KV stays while states move."""

from parallel.context.layout import BALANCED, LAYOUTS, ContextError
from parallel.context.methods.base import BalancedMethod, Method, Ranks, Round, Send, Shape


class AllGather(BalancedMethod):
    """Every rank gathers all KV once, and then works alone (Llama 3, section 3.3.2); all of it is
    in memory.
    """

    name = "allgather"
    layouts = (*LAYOUTS, BALANCED)

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        return [Round(tuple(range(shape.size)), (), Send(rank, 1))]


class Ulysses(Method):
    """One all-to-all gives each rank all tokens of some heads, another undoes it (Jacobs et al.
    2023).

    Its degree is an option of every method: groups of so many neighbours split the heads, and the
    method runs over the groups; here one of all ranks. Contiguous by default: every rank has the
    same work, whatever the layout.
    """

    name = "ulysses"
    splits_heads = True

    def check(self, shape: Shape, causal: bool) -> None:
        super().check(shape, causal)
        if shape.size != 1:
            raise ContextError(
                f"method ulysses splits the heads among all ranks, and ulysses_degree leaves {shape.size} groups; "
                "leave it out, or choose another method to run over the groups"
            )


class StateMethod(Method):
    """Linear attention: a rank needs only the state after the tokens before each of its stretches
    of tokens.

    KV stays, and states move as ``states`` says.
    """

    masks = ("causal",)
    layouts = ("contiguous", "zigzag")


class Lasp(StateMethod):
    """Receive the state after the tokens before, add this stretch's, and send the sum to the next
    stretch's rank.

    Sun et al. 2024.
    """

    name = "lasp"
    states = "neighbour"


class Lasp2(StateMethod):
    """All-gather every stretch's state; each rank sums those before its own (Sun et al. 2025)."""

    name = "lasp2"
    states = "gather"
