"""LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a LLaMA."""

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside SwiGLU; by default 8/3 of hidden_size, rounded up to a multiple of 64."""
    num_attention_heads: int = 8
    """Query heads."""
    num_query_groups: int | None = None
    """Key and value heads (grouped-query attention); by default one per query head."""
    kv_channels: int | None = None
    """Width of one head; by default hidden_size / num_attention_heads."""
    vocab_size: int | None = None
    """Vocabulary entries; by default the tokenizer's."""
    rotary_base: float = 10000.0
    """Base of the rotary angles."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output projection weights of its own, not the embedding's."""
