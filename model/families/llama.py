"""LLaMA (Touvron et al. 2023), with RMSNorm, rope, SwiGLU and no biases; and its kin, which add a bias or norms."""

from dataclasses import dataclass

from model.config import Footprint
from model.parts.settings import RopePositionsConfig, WindowedConfig
from model.traits import Traits


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(WindowedConfig, RopePositionsConfig):
    """A LLaMA: RMSNorm, rope, SwiGLU, no biases."""

    model_type: str = "llama"
    add_qkv_bias: bool = False
    """Give the projections of queries, keys and values biases in a llama, as Qwen2 has them."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys by an RMS norm in a llama, as Qwen3 does."""

    title = "LLaMA"
    footprint = Footprint(fused_residual=4.0, gated=True)
    traits = Traits()

    def architecture(self) -> dict[str, int | float | bool | str | None]:
        """Return that of ``DecoderConfig``, with biases and norms of queries and keys."""
        own = {name: True for name in ("add_qkv_bias", "qk_layernorm") if getattr(self, name)}
        return super().architecture() | own
