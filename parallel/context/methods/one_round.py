"""Methods of one round: all-gathers, DeepSpeed Ulysses, and LASP, which moves states, not KV."""

from parallel.context.layout import BALANCED, LAYOUTS, ContextError
from parallel.context.methods.base import BalancedMethod, Method, Ranks, Round, Send, Shape


class AllGather(BalancedMethod):
    """Every rank gathers all KV once, then attends alone (Llama 3, section 3.3.2).

    Every rank has all KV in memory, so any document mask works. With few KV heads this takes little
    memory, and the gather is short compared to the attention.
    """

    name = "allgather"
    in_slices = "allgather_q"
    layouts = (*LAYOUTS, BALANCED)

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        return [Round(tuple(range(shape.size)), (), Send(rank, 1))]


class AllGatherQ(BalancedMethod):
    """Every rank gathers all queries once, and attends with them to its own KV.

    The partial results go to the ranks of their queries, which merge them: pass-Q of Yang et al.
    2024 (arXiv:2411.01783, section 3.5), in one round. KV stays where it is, so a slice of a
    sequence can attend to the keys of all earlier slices without sending these again
    (parallel/context/slices).
    """

    name = "allgather_q"
    in_slices = "allgather_q"
    for_slices_only = True

    def team(self, rank: Ranks, shape: Shape) -> tuple[Ranks, ...]:
        return tuple(range(shape.size))


class Ulysses(Method):
    """One all-to-all gives each rank all tokens of some heads; a second one reverses it.

    Jacobs et al. 2023. The degree is also an option of the other methods that move KV: groups of
    that many neighbours split the heads, and the method treats each group as one rank. Here all
    ranks are one group. The layout is contiguous by default, since every rank has the same work in
    any layout.
    """

    name = "ulysses"
    in_slices = "ulysses"
    splits_heads = True

    def check(self, shape: Shape, causal: bool) -> None:
        super().check(shape, causal)
        if shape.size != 1:
            raise ContextError(
                "method ulysses splits the heads among all ranks, but ulysses_degree leaves "
                f"{shape.size} groups; leave out ulysses_degree, or choose another method"
            )


class StateMethod(Method):
    """Linear attention: a rank needs only the state after the tokens before its own.

    It needs one such state for each of its stretches of consecutive tokens. Only states move, not
    KV; the attribute ``states`` says how. A state has the same size after any number of tokens, so
    traffic does not grow with the sequence.
    """

    masks = ("causal",)
    layouts = ("contiguous", "zigzag")


class Lasp(StateMethod):
    """Each rank adds its own state to the one it receives, and sends the sum to the next rank.

    Sun et al. 2024.
    """

    name = "lasp"
    states = "neighbour"


class Lasp2(StateMethod):
    """Ranks all-gather the states of all stretches, and sum those before their own.

    Sun et al. 2025.
    """

    name = "lasp2"
    states = "gather"
