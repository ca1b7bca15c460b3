"""Properties that each family fixes, beside the settings that it shares with the others."""

from typing import Literal, NamedTuple


class Traits(NamedTuple):
    """Properties of all models of a family; the defaults are a LLaMA's."""

    norm: Literal["rms", "zero_centred", "weightless", "layer"] = "rms"
    """All norms but that of a delta rule's output; zero_centred ones multiply by 1 + weight."""
    norms: Literal["pre", "post", "both"] = "pre"
    """Layers of softmax attention normalise what they read of the residual stream, what they add to it, or both."""
    qk_norm: Literal["head", "joint"] | None = None
    """RMS norms of queries and keys: of each head, or over all heads at once; None leaves it to qk_layernorm."""
    output_gate: bool = False
    """Softmax attention's output is multiplied by the sigmoid of a projection."""
    biases: bool = False
    """Softmax attention's projections have biases."""
    feed_forward: Literal["swiglu", "geglu", "sglu", "gelu"] = "swiglu"
    """The feed-forward: gated by SiLU, GELU or the projection itself, or without a gate."""
    rounds_scale: bool = False
    """Embeddings are multiplied by the root of hidden_size, in their own dtype."""
    most_beta: float = 1.0
    """Largest share of its change that a token's key writes: above 1 eigenvalues are negative."""
    out_epsilon: float | None = None
    """Epsilon of the norm of a delta rule's output; None is that of all norms."""
    dt_ones: bool = False
    """The bias of a delta rule's gates begins at 1, not as softplus^-1 of 0.001 to 0.1."""
