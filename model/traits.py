"""Properties that each model_type fixes, beside the settings that it shares with the others."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Traits(NamedTuple):
    """Properties of all models of a kind; the defaults are a LLaMA's."""

    title: str
    """Its name on the screen."""
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
    positions: Literal["rope", "learned_absolute", "lrpe", "sinusoidal", "none"] = "rope"
    """The source of tokens' places: lrpe and sinusoidal are those of linear attention."""
    local_rope: bool = False
    """Layers with a window have plain rope, of a base of their own."""
    delta: bool = False
    """Layers without softmax attention have a gated delta rule."""
    most_beta: float = 1.0
    """Largest share of its change that a token's key writes: above 1 eigenvalues are negative."""
    out_epsilon: float | None = None
    """Epsilon of the norm of a delta rule's output; None is that of all norms."""
    dt_ones: bool = False
    """The bias of a delta rule's gates begins at 1, not as softplus^-1 of 0.001 to 0.1."""


TRAITS = {
    "llama": Traits("LLaMA"),
    "gpt": Traits("GPT", norm="layer", biases=True, feed_forward="gelu", positions="learned_absolute"),
    "transnormer": Traits("TransNormer", norm="weightless", feed_forward="sglu", positions="lrpe"),
    "linear_transformer": Traits("Linear Transformer", norm="layer", feed_forward="gelu", positions="sinusoidal"),
    "gemma3": Traits(
        "Gemma 3",
        norm="zero_centred",
        norms="both",
        qk_norm="head",
        feed_forward="geglu",
        rounds_scale=True,
        local_rope=True,
    ),
    "olmo3": Traits("OLMo 3", norms="post", qk_norm="joint", local_rope=True),
    "qwen3_5": Traits("Qwen3.5", norm="zero_centred", qk_norm="head", output_gate=True, delta=True, dt_ones=True),
    "olmo_hybrid": Traits(
        "OLMo Hybrid", norms="post", qk_norm="joint", positions="none", delta=True, most_beta=2.0, out_epsilon=1e-5
    ),
}
"""By model_type."""
HYBRIDS = tuple(kind for kind, traits in TRAITS.items() if traits.delta)
LLAMAS = ("llama", "gemma3", "olmo3")
"""Kinds whose layers all have a LLaMA's attention and linear layers."""
EVERY = 4
"""Layers from one with softmax attention to the next, in hybrids of a delta rule by default."""


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Layers with a gated delta rule, in a qwen3_5 or olmo_hybrid."""

    linear_num_key_heads: int | None = None
    """Key heads of a layer with a gated delta rule (qwen3_5, olmo_hybrid); by default num_attention_heads."""
    linear_num_value_heads: int | None = None
    """Value heads of a layer with a gated delta rule, a multiple of its key heads; by default as many."""
    linear_key_head_dim: int | None = None
    """Width of a key head of a layer with a gated delta rule; by default that of a head of softmax attention."""
    linear_value_head_dim: int | None = None
    """Width of a value head of a layer with a gated delta rule; by default that of a key head."""
    linear_conv_kernel_dim: int = 4
    """Tokens that the convolution before a gated delta rule sees, its own among them."""
    linear_gate: Literal["per_head", "per_channel"] = "per_head"
    """Gate of a delta rule: a number per head (Gated DeltaNet), or one per channel of each key, with output gates
    through a bottleneck too (Kimi Delta Attention)."""


SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
