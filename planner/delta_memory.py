"""Count the memory of one layer's gated delta rule: a rank's heads, in bytes per token or of all its tokens."""

from parallel.context.plan import Plan
from planner.delta_cost import DeltaShape, wide_share


def results_of(of: DeltaShape, plan: Plan, batch: int, element_size: int) -> list[float]:
    """Return bytes per token of what the rule's operator returns: states, Q and the output.

    Q is what a state that comes later adds to the outputs of tokens that do not wait for it.
    """
    states = of.states_bytes(batch, plan.local_len) / (batch * plan.local_len)
    return [states, 4 * wide_share(plan) * of.heads * of.key_dim, element_size * of.outputs]


def activations_of(of: DeltaShape, plan: Plan, batch: int, element_size: int, normed: float) -> float:
    """Return bytes per token that it keeps for a backward with what is around it.

    q, k and v before and after the convolution and the activation, queries and keys normalised, in float32 and in their
    dtype; the output before and after its norm, which keeps ``normed`` copies, its gate, and both together; gates;
    states and Q.
    """
    states, reads, *_ = results_of(of, plan, batch, element_size)
    both = 2 * of.key_heads * of.key_dim
    gates = 4 * of.heads * (3 + 4 * (of.key_dim if of.per_channel else 1))
    channels = 3 * of.channels + both + (4 + normed) * of.outputs
    return states + reads + element_size * channels + 4 * both * (element_size < 4) + gates


def buffers_of(of: DeltaShape, batch: int, tokens: int, element_size: int) -> float:
    """Return bytes of a backward: gradients of q, k and v as its kernels give them and in their dtype; work space."""
    gradients = batch * tokens * of.channels * (max(4, element_size) + element_size)
    return gradients + of.workspace(batch, tokens)
